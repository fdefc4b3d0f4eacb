"""Predicted bytes on the wire are those that a run hands to its collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_ep import Layout, TopKRouter
from lightning_moe_ep.planning.look import Look, look_at
from lightning_moe_ep.planning.shapes import ModelShapes, shapes_of
from lightning_moe_ep.planning.wire import Step, Wire, host_calls, layers_of, wire_of
from tests.matrix import mostly_more
from tests.parity import Case, CaseModule
from tests.planning.counting import SlicedModule, counted, predicted, rows_between
from tests.pool import RankPool


def shapes_and_look(case: Case) -> tuple[ModelShapes, Look]:
    module = CaseModule(case)
    with torch.device("meta"):
        module.configure_model()
    shapes = shapes_of(module, precision=case.precision, fp32_modules=case.strategy.get("fp32_modules", ()))
    return shapes, look_at(module, shapes, length=8)


def step_of(case: Case) -> Step:
    options = case.strategy
    return Step(
        tokens=max(max(of_rank) for of_rank in case.tokens) // options.get("cp", 1),
        micro_batches=len(case.tokens[0]),
        reduce_every_micro_batch=options.get("reduce_every_micro_batch", False),
        reshard=options.get("reshard_after_forward", True),
        dispatcher=options.get("dispatcher", "all_gather"),
        combine_dtype=options.get("combine_dtype", "auto"),
        activation_checkpointing=options.get("activation_checkpointing", "none"),
    )


def plan(case: Case, shapes: ModelShapes, look: Look, **options: Any) -> Wire:
    layout = Layout.for_world(case.world, ep=case.ep, replicate=case.replicate, cp=case.strategy.get("cp", 1))
    return wire_of(
        shapes,
        layout,
        step_of(case),
        devices_per_node=8,
        layers=layers_of(shapes, look.routing),
        attentions=look.attentions,
        **options,
    )


class UniformRouter(TopKRouter):
    """Draws the experts of each token, without preference."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden, self.weight)
        index = torch.rand(logits.shape).argsort(dim=1)[:, : self.top_k]
        return logits, logits.softmax(dim=-1).gather(1, index).to(hidden.dtype), index


class UniformModule(CaseModule):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            block.moe.router.__class__ = UniformRouter


GATHERED = {"dispatcher": "all_gather"}


@pytest.mark.parametrize(
    "case",
    [
        Case(ep=2, world=2, tokens=((16, 16), (8, 3)), strategy=GATHERED, steps=2),
        Case(kind="qwen3_moe", ep=1, world=2, precision="bf16-mixed", clip=0.1),
        Case(kind="qwen3_moe", ep=2, world=4, precision="bf16-true", strategy=GATHERED),
        Case(
            kind="own",
            model={"num_experts": 6},
            ep=2,
            world=4,
            replicate=2,
            tokens=((16, 16),),
            strategy={**GATHERED, "reduce_every_micro_batch": True},
        ),
    ],
)
def test_all_gather_and_fsdp_to_the_byte(ranks: RankPool, case: Case) -> None:
    expected = predicted(plan(case, *shapes_and_look(case)).messages)
    for sent, _, _ in ranks.run(counted, case, world=case.world):
        assert sent == expected


FEW_KEYS = {"num_attention_heads": 4, "num_key_value_heads": 1}


IN_SLICES = [
    Case(
        kind="qwen3_moe",
        world=2,
        tokens=((24, 24),),
        precision="bf16-mixed",
        model=FEW_KEYS,
        strategy={**GATHERED, "cp": 2, "activation_checkpointing": "full"},
    ),
    Case(kind="qwen3_moe", world=4, tokens=((24,),), strategy={**GATHERED, "cp": 4}),
    Case(kind="mixtral", world=4, model=FEW_KEYS, strategy={**GATHERED, "cp": 2}, frozen="layers.0|embed"),
    Case(
        kind="qwen3_moe",
        world=2,
        ep=1,
        strategy={"cp": 2, "activation_checkpointing": "selective"},
        frozen="layers.0.mlp.experts",
    ),
]


@pytest.mark.parametrize("case", mostly_more(IN_SLICES, IN_SLICES[0]))
def test_what_attentions_exchange_to_the_byte(ranks: RankPool, case: Case) -> None:
    expected = predicted(plan(case, *shapes_and_look(case)).messages)
    for sent, _, _ in ranks.run(counted, case, SlicedModule, world=case.world):
        assert sent == expected


@pytest.mark.parametrize(
    "case",
    [
        Case(ep=2, world=2, tokens=((16,), (7,)), strategy={"dispatcher": "all_to_all"}),
        Case(
            kind="qwen3_moe",
            world=4,
            precision="bf16-true",
            strategy={"dispatcher": "all_to_all", "activation_checkpointing": "full", "combine_dtype": "float32"},
        ),
        Case(
            world=2,
            tokens=((1024,),),
            strategy={
                "dispatcher": "overlapped",
                "activation_checkpointing": "selective",
                "reshard_after_forward": False,
            },
        ),
    ],
)
def test_all_to_all_to_the_byte_given_the_routing(ranks: RankPool, case: Case) -> None:
    shapes, look = shapes_and_look(case)
    results = ranks.run(counted, case, world=case.world)
    routed = [routed for _, _, routed in results]
    for rank, (sent, _, _) in enumerate(results):
        rows = rows_between(routed, rank, case.ep)
        names = [experts.name for experts in shapes.experts]
        assert len(rows) == len(names)
        assert sent == predicted(plan(case, shapes, look, rows=dict(zip(names, rows, strict=True))).messages)


@pytest.mark.parametrize(
    "case",
    [
        Case(kind="qwen3_moe", world=2, strategy={**GATHERED, "activation_checkpointing": "full"}),
        Case(kind="own", world=2, strategy={**GATHERED, "activation_checkpointing": "full"}),
        Case(kind="qwen3_moe", world=2, strategy={**GATHERED, "activation_checkpointing": "selective"}),
        Case(kind="qwen3_moe", world=2, strategy=GATHERED, frozen="mlp.gate|layers.0|embed"),
        Case(kind="qwen3_moe", world=2, strategy=GATHERED, frozen="mlp.experts"),
        Case(kind="mixtral", world=2, precision="bf16-mixed", strategy={**GATHERED, "fp32_modules": ["mlp.gate"]}),
    ],
)
def test_all_gather_recomputed_frozen_in_fp32(ranks: RankPool, case: Case) -> None:
    expected = predicted(plan(case, *shapes_and_look(case)).messages)
    for sent, _, _ in ranks.run(counted, case, world=case.world):
        assert sent == expected


@pytest.mark.parametrize(("world", "top_k"), mostly_more([(2, 2), (4, 3)], (2, 2)))
def test_all_to_all_within_two_percent_under_uniform_routing(ranks: RankPool, world: int, top_k: int) -> None:
    model = {"num_experts": 8, "top_k": top_k, "intermediate_size": 8}
    case = Case(ep=world, world=world, model=model, tokens=((2048,),), strategy={"dispatcher": "all_to_all"})
    expected = predicted(plan(case, *shapes_and_look(case)).messages)
    for sent, _, _ in ranks.run(counted, case, UniformModule, world=world):
        assert sent.keys() == expected.keys()
        for key, nbytes in sent.items():
            assert nbytes == pytest.approx(expected[key], rel=0.02), key


@pytest.mark.parametrize(
    ("dispatcher", "equal", "calls"), [("all_gather", False, 4), ("all_gather", True, 0), ("all_to_all", False, 0)]
)
def test_what_goes_over_the_host_is_told_apart(ranks: RankPool, dispatcher: str, equal: bool, calls: int) -> None:
    case = Case(tokens=((16, 16),), strategy={"dispatcher": dispatcher, "equal_tokens": equal})
    shapes, _ = shapes_and_look(case)
    assert host_calls(shapes, Layout(1, 1, 2), step_of(case), equal_tokens=equal) == calls
    for _, over_host, _ in ranks.run(counted, case, world=2):
        assert over_host == calls


def wire(layout: Layout, dispatcher: str, devices_per_node: int) -> Wire:
    shapes, look = shapes_and_look(Case())
    step = Step(tokens=128, dispatcher=dispatcher)
    return wire_of(shapes, layout, step, devices_per_node=devices_per_node, layers=layers_of(shapes, look.routing))


def test_inside_and_between_nodes() -> None:
    everything = wire(Layout(1, 2, 4), "all_to_all", 8)
    assert everything.inter == 0 and everything.intra == everything.nbytes
    apart = wire(Layout(1, 2, 4), "all_to_all", 1)
    assert apart.intra == 0 and apart.inter == everything.nbytes
    # ep inside of a node: experts go between nodes whole, of a ring over both nodes the fourth part does.
    two = wire(Layout(1, 2, 4), "all_to_all", 4)
    of = {group: two.where(lambda m, group=group: m.group == group) for group in ("efsdp", "ep", "fsdp", "world")}
    assert two.inter == pytest.approx(of["efsdp"] + (of["fsdp"] + of["world"]) / 4)
    # ep over two nodes: of a token's rows to 3 other ranks, those to 2 leave the node, and half of a ring's.
    assert wire(Layout(1, 1, 4), "all_to_all", 2).inter == pytest.approx(
        sum(m.nbytes * (2 / 3 if m.group == "ep" else 1 / 2) for m in wire(Layout(1, 1, 4), "all_to_all", 8).messages)
    )
    # Nodes that cut groups unevenly: the rank that is alone on its node has all of its group on others.
    assert wire(Layout(1, 1, 4), "all_gather", 3).intra == 0
