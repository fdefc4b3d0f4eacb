"""Experts that are a ModuleList: gradients against one process, through a real Trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests import oracle
from tests.list_models import BLOCKS, plain_names
from tests.parity import Case, train, worst
from tests.pool import RankPool


def check(pool: RankPool, case: Case) -> None:
    """Run the case and compare with one process: gradients to 1e-5, norms to 1e-6, weights to 1e-4."""
    results = pool.run(train, case, world=case.world)
    initial, ours = results[0]
    theirs = oracle.answer(case.kind, case.model, plain_names(initial), case.batches(), clip=case.clip)
    for step, (mine, right) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        error, name = worst(plain_names(mine), right)
        assert error < 1e-5, f"step {step}: the gradient of {name} is off by {error:.1e}"
    for _, answer in results:
        assert answer.norms == ours.norms, "ranks disagree on the norm"
    for mine_norm, right_norm in zip(ours.norms, theirs.norms, strict=True):
        assert abs(mine_norm - right_norm) <= 1e-6 * right_norm
    error, name = worst(plain_names(ours.weights), theirs.weights)
    assert error < 1e-4, f"the weight {name} is off by {error:.1e}"


LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"world": 2, "ep": 2},
    "efsdp2-ep2": {"world": 4, "ep": 2},
    "efsdp2": {"world": 2, "ep": 1},
    "replicate2-ep2": {"world": 4, "ep": 2, "replicate": 2},
}


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(ranks: RankPool, kind: str, layout: str) -> None:
    check(ranks, Case(kind=kind, steps=2, clip=0.1, **LAYOUTS[layout]))


MIXTRAL, DEEPSEEK, HIT = "own_list_mixtral", "own_list_deepseek", "own_list_hit"

ODD = {
    "no token on rank 0": Case(kind=MIXTRAL, tokens=((0,), (16,)), steps=2),
    "no call on rank 0": Case(kind=HIT, tokens=((0,), (16,)), steps=2),
    "no call on rank 1 at ep 1": Case(kind=HIT, tokens=((16,), (0,)), ep=1),
    "no call anywhere": Case(kind=HIT, tokens=((0,),)),
    "one token": Case(kind=HIT, tokens=((1,), (0,)), model={"top_k": 1}),
    "unequal tokens": Case(kind=DEEPSEEK, tokens=((5,), (16,), (1,), (32,)), world=4, ep=2),
    "unequal micro-batches": Case(kind=HIT, tokens=((5, 16, 3), (16, 1, 7)), steps=2, clip=0.1),
    "one expert a rank": Case(kind=DEEPSEEK, model={"num_experts": 4}, world=4, ep=4),
    "uneven experts": Case(kind=MIXTRAL, model={"num_experts": 6, "intermediate_size": 33}, world=4, ep=2),
    "bias": Case(kind=DEEPSEEK, model={"bias": True}, world=4, ep=2),
    "bias, loop": Case(kind=DEEPSEEK, model={"bias": True}, strategy={"computation": "loop"}),
    "loop": Case(kind=MIXTRAL, strategy={"computation": "loop"}),
    "grouped_mm": Case(kind=MIXTRAL, strategy={"computation": "grouped_mm"}),
    "promised equal tokens": Case(kind=HIT, strategy={"equal_tokens": True}),
    "reduce every micro-batch": Case(
        kind=HIT, strategy={"reduce_every_micro_batch": True}, tokens=((5, 16, 3), (16, 1, 7)), steps=2, clip=0.1
    ),
    "meta": Case(kind=DEEPSEEK, strategy={"init_on_meta": True}, model={"bias": True}, world=4, ep=2),
    "meta, own parameters": Case(kind="own_list_scaled", strategy={"init_on_meta": True}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(ranks: RankPool, name: str) -> None:
    check(ranks, ODD[name])


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all", "three_chunks"])
@pytest.mark.parametrize("name", ["no call on rank 0", "unequal tokens"])
def test_dispatchers(ranks: RankPool, name: str, dispatcher: str) -> None:
    check(ranks, dataclasses.replace(ODD[name], strategy={"dispatcher": dispatcher}))
