"""Predicted bytes on the wire are those that a run hands to its collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_moe_ep import Layout
from lightning_moe_ep.tools.plan.shapes import ModelShapes, shapes_of
from lightning_moe_ep.tools.plan.wire import Step, Wire, wire_of
from tests.parity import Case, CaseModule
from tests.pool import RankPool
from tests.tools.plan.counting import counted, predicted, rows_between


def shapes_of_case(case: Case, modules: type[CaseModule] = CaseModule) -> ModelShapes:
    module = modules(case)
    with torch.device("meta"):
        module.configure_model()
    return shapes_of(module, precision=case.precision, fp32_modules=case.strategy.get("fp32_modules", ()))


def step_of(case: Case) -> Step:
    options = case.strategy
    return Step(
        tokens=max(max(of_rank) for of_rank in case.tokens),
        micro_batches=len(case.tokens[0]),
        reduce_every_micro_batch=options.get("reduce_every_micro_batch", False),
        reshard=options.get("reshard_after_forward", True),
        dispatcher=options.get("dispatcher", "all_gather"),
        combine_dtype=options.get("combine_dtype", "auto"),
        activation_checkpointing=options.get("activation_checkpointing", "none"),
    )


def plan(case: Case, shapes: ModelShapes, **options: Any) -> Wire:
    layout = Layout.for_world(case.world, ep=case.ep, replicate=case.replicate)
    return wire_of(shapes, layout, step_of(case), devices_per_node=8, **options)


GATHERED = {"dispatcher": "all_gather"}


@pytest.mark.parametrize(
    "case",
    [
        Case(ep=2, world=2, tokens=((16, 16), (8, 3)), strategy=GATHERED, steps=2),
        Case(kind="qwen3_moe", ep=1, world=2, precision="bf16-mixed", clip=0.1),
        Case(kind="qwen3_moe", ep=2, world=4, precision="bf16-true", strategy=GATHERED),
        Case(kind="own", model={"num_experts": 6}, ep=2, world=4, replicate=2, tokens=((16, 16),), strategy={**GATHERED, "reduce_every_micro_batch": True}),
    ],
)
def test_all_gather_and_fsdp_to_the_byte(ranks: RankPool, case: Case) -> None:
    expected = predicted(plan(case, shapes_of_case(case)).messages)
    for sent, _, _ in ranks.run(counted, case, world=case.world):
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
            strategy={"dispatcher": "overlapped", "activation_checkpointing": "selective", "reshard_after_forward": False},
        ),
    ],
)
def test_all_to_all_to_the_byte_given_the_routing(ranks: RankPool, case: Case) -> None:
    shapes = shapes_of_case(case)
    results = ranks.run(counted, case, world=case.world)
    routed = [routed for _, _, routed in results]
    for rank, (sent, _, _) in enumerate(results):
        rows = rows_between(routed, rank, case.ep)
        names = [experts.name for experts in shapes.experts]
        assert len(rows) == len(names)
        assert sent == predicted(plan(case, shapes, rows=dict(zip(names, rows, strict=True))).messages)


@pytest.mark.parametrize(
    "case",
    [
        Case(kind="qwen3_moe", world=2, strategy={**GATHERED, "activation_checkpointing": "full"}),
        Case(kind="own", world=2, strategy={**GATHERED, "activation_checkpointing": "full"}),
        Case(kind="qwen3_moe", world=2, strategy={**GATHERED, "activation_checkpointing": "selective"}),
        Case(kind="qwen3_moe", world=2, strategy=GATHERED, frozen="mlp.gate|layers.0|embed"),
        Case(kind="qwen3_moe", world=2, strategy=GATHERED, frozen="mlp.experts"),
        Case(kind="mixtral", world=2, ep=1, precision="bf16-mixed", strategy={"fp32_modules": ["mlp.gate"]}),
    ],
)
def test_all_gather_recomputed_frozen_in_fp32(ranks: RankPool, case: Case) -> None:
    expected = predicted(plan(case, shapes_of_case(case)).messages)
    for sent, _, _ in ranks.run(counted, case, world=case.world):
        assert sent == expected
