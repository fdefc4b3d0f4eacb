"""PEFT's LoRA under expert parallelism; the oracle is plain PEFT in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_moe_ep import Layout, build_meshes, parallelize
from lightning_moe_ep.experts import expert_parameters
from lightning_moe_ep.gradients import scale_gradients
from tests.families.tiny import loss_of, tiny_batch, tiny_model
from tests.parity import Case, check, plain, worst
from tests.pool import RankPool

LAYOUTS = {
    "efsdp2": {"world": 2, "ep": 1},
    "ep2": {"world": 2, "ep": 2},
    "efsdp2-ep2": {"world": 4, "ep": 2},
    "replicate2-ep2": {"world": 4, "ep": 2, "replicate": 2},
}

UP, DOWN = "experts.gate_up_proj", "experts.down_proj"

# Both matrices are random, as with lora_B = 0 the gradient of lora_A would be 0.
START = {"r": 3, "lora_alpha": 7, "init_lora_weights": False}

LORA = {
    "dense": {**START, "target_modules": ["q_proj", "v_proj"]},
    "experts": {**START, "target_modules": [], "target_parameters": [UP, DOWN]},
    "up only": {**START, "target_modules": [], "target_parameters": [UP]},
    "down only": {**START, "target_modules": [], "target_parameters": [DOWN], "use_rslora": True},
    "all": {
        **START,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": [UP, DOWN, "gate.weight"],
        "rank_pattern": {UP: 4},
    },
}


@pytest.mark.parametrize("lora", LORA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ranks: RankPool, layout: str, lora: str) -> None:
    check(ranks, Case(kind="qwen3_moe", model={"lora": LORA[lora]}, steps=2, clip=0.1, **LAYOUTS[layout]))


def _family(family: str, targets: tuple[str, ...], computation: Any) -> tuple[float, str]:
    """On a rank: how far the gradients are off from those of plain PEFT over all ranks' batches, and where."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        lora = LoraConfig(**START, target_modules=[], target_parameters=list(targets))
        return get_peft_model(tiny_model(family), lora)

    def backward(model: nn.Module) -> dict[str, Tensor]:
        loss_of(family, model, tiny_batch(family, seed=dist.get_rank())).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    right = backward(build())
    assert right
    for gradient in right.values():
        dist.all_reduce(gradient.div_(dist.get_world_size()))
    model = build()
    parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=2), "cpu"), computation=computation)
    ours = backward(model)
    scale_gradients(expert_parameters(model), 0.5)
    return worst(plain(model, ours), right)


@pytest.mark.parametrize(
    ("family", "targets", "computations"),
    [
        ("deepseek_v3", (UP, DOWN), ("grouped_mm", "native")),
        ("gpt_oss", (UP, DOWN), ("grouped_mm", "loop", "native")),  # transposed, with biases
        ("aria_text", (UP,), ("grouped_mm",)),
        ("nemotron_h", ("experts.up_proj", DOWN), ("grouped_mm", "loop")),  # no gate
        ("muse_spark_text", (UP, DOWN), ("grouped_mm",)),  # a norm that all experts share
        ("llama4_text", (UP, DOWN), ("grouped_mm", "loop")),  # transposed, which PEFT does not know
        ("longcat_flash", (DOWN,), ("grouped_mm",)),
        ("ernie4_5_vl_moe_text", (UP, DOWN), ("auto",)),
        ("jetmoe", ("input_linear.weight", "output_linear.weight"), ("auto",)),  # not by compute_experts
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families(ranks: RankPool, family: str, targets: tuple[str, ...], computations: tuple[str, ...]) -> None:
    for computation in computations:
        for error, name in ranks.run(_family, family, targets, computation, world=4):
            assert error < 1e-5, f"{computation}: the gradient of {name} is off by {error:.1e}"


OWN = {**START, "target_modules": ["head"], "target_parameters": [UP, DOWN]}

ODD = {
    "no token on rank 0": Case(tokens=((0,), (16,))),
    "no token anywhere": Case(tokens=((0,),)),
    "unequal micro-batches, one empty": Case(tokens=((5, 0), (0, 7), (3, 3), (0, 0)), world=4, ep=2, steps=2),
    "uneven experts": Case(model={"num_experts": 6, "intermediate_size": 33}, world=4, ep=2),
    "one expert a rank": Case(model={"num_experts": 2}, world=4, ep=2),
    "loop": Case(strategy={"computation": "loop"}, world=4, ep=2),
    "native": Case(strategy={"computation": "native"}, tokens=((0,), (16,))),
    "meta": Case(strategy={"init_on_meta": True}, world=4, ep=2),
    "several chunks": Case(strategy={"dispatcher": "three_chunks"}, tokens=((16, 1), (9, 0))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(ranks: RankPool, name: str) -> None:
    check(ranks, dataclasses.replace(ODD[name], model={**ODD[name].model, "lora": OWN}))
