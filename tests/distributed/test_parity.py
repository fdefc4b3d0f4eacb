"""Gradients, norms and weights against one process, through a real Trainer."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.matrix import mostly_more
from tests.parity import Case, check
from tests.pool import RankPool

LAYOUTS = {
    "efsdp2": {"world": 2, "ep": 1},
    "ep2": {"world": 2, "ep": 2},
    "efsdp2-ep2": {"world": 4, "ep": 2},
    "ep4": {"world": 4, "ep": 4},
    "replicate2-ep2": {"world": 4, "ep": 2, "replicate": 2},
    "efsdp3-ep2": {"world": 6, "ep": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_model(ranks: RankPool, layout: str) -> None:
    check(ranks, Case(steps=3, clip=0.1, **LAYOUTS[layout]))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("layout", mostly_more(LAYOUTS, "efsdp3-ep2"))
def test_family(ranks: RankPool, family: str, layout: str) -> None:
    check(ranks, Case(kind=family, steps=3, clip=0.1, **LAYOUTS[layout]))


ODD = {
    "all tokens to expert 0": Case(kind="own_same_expert", model={"top_k": 1}),
    "all tokens to experts of rank 0": Case(kind="own_same_expert", model={"top_k": 4}, world=4, ep=2),
    "no token on rank 0": Case(tokens=((0,), (16,))),
    "no token on rank 1 at ep 1": Case(tokens=((16,), (0,)), ep=1),
    "no token on any rank but one": Case(tokens=((0,), (0,), (9,), (0,)), world=4, ep=4),
    "no token anywhere": Case(tokens=((0,),)),
    "unequal tokens": Case(tokens=((5,), (16,), (1,), (32,)), world=4, ep=2),
    "unequal micro-batches": Case(tokens=((5, 16, 3), (16, 1, 7)), steps=2, clip=0.1),
    "unequal micro-batches, one empty": Case(tokens=((5, 0), (0, 7), (3, 3), (0, 0)), world=4, ep=2, steps=2),
    "one expert a rank": Case(model={"num_experts": 4}, world=4, ep=4),
    "one expert a rank, efsdp 2": Case(model={"num_experts": 2}, world=4, ep=2),
    "uneven experts": Case(model={"num_experts": 6, "intermediate_size": 33}, world=4, ep=2),
    "K is 1": Case(model={"top_k": 1, "normalize": False}, world=4, ep=2),
    "K is E": Case(model={"num_experts": 4, "top_k": 4}, world=4, ep=4),
    "sizes that grouped_mm does not take": Case(model={"intermediate_size": 5}),
    "loop": Case(strategy={"computation": "loop"}, world=4, ep=2),
    "native": Case(strategy={"computation": "native"}, world=4, ep=2),
    "grouped_mm": Case(strategy={"computation": "grouped_mm"}, world=4, ep=2),
    "combine in the input's dtype": Case(strategy={"combine_dtype": "input"}),
    "promised equal tokens": Case(strategy={"equal_tokens": True}),
    "no reshard": Case(strategy={"reshard_after_forward": False}, world=4, ep=2, steps=2),
    "reduce every micro-batch": Case(
        strategy={"reduce_every_micro_batch": True}, tokens=((5, 16, 3), (16, 1, 7)), steps=2, clip=0.1
    ),
    "reduce every micro-batch, ep 3": Case(
        strategy={"reduce_every_micro_batch": True}, tokens=((5, 3), (1, 7)), world=6, ep=3, model={"num_experts": 6}
    ),
    "meta": Case(strategy={"init_on_meta": True}, world=4, ep=2),
}


DISPATCHERS = ["all_gather", "all_to_all", "three_chunks"]


@pytest.mark.parametrize(
    ("name", "dispatcher"),
    mostly_more(
        [(n, d) for n, case in ODD.items() for d in (DISPATCHERS if case.ep > 1 else DISPATCHERS[:1])],
        *((n, "all_to_all" if case.ep > 1 else DISPATCHERS[0]) for n, case in ODD.items()),
    ),
)
def test_odd_sizes(ranks: RankPool, name: str, dispatcher: str) -> None:
    case = ODD[name]
    check(ranks, dataclasses.replace(case, strategy={"dispatcher": dispatcher, **case.strategy}))


@pytest.mark.parametrize(
    "case",
    [
        Case(kind="qwen3_moe", tokens=((8,), (24,), (40,), (16,)), world=4, ep=2),
        Case(kind="mixtral", tokens=((8, 24), (16, 8)), steps=2, clip=0.1),
        Case(kind="olmoe", tokens=((64,), (8,)), ep=1),
        Case(kind="qwen3_moe", strategy={"computation": "native"}),
        Case(kind="mixtral", strategy={"computation": "native"}, model={"experts_implementation": "eager"}),
        Case(kind="olmoe", strategy={"computation": "native"}, model={"experts_implementation": "batched_mm"}),
    ],
    ids=lambda case: f"{case.kind}-{case.tokens}",
)
def test_families_with_odd_sizes(ranks: RankPool, case: Case) -> None:
    check(ranks, case)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("layout", mostly_more(["efsdp3-ep2", "replicate2-ep2"], "efsdp3-ep2"))
def test_norm_types(ranks: RankPool, norm_type: float, layout: str) -> None:
    check(ranks, Case(steps=2, clip=0.05, norm_type=norm_type, **LAYOUTS[layout]))
