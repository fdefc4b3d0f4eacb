"""Parallelizing at the size of a world that is not there gives what the arithmetic says."""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep.layout import Layout
from lightning_moe_ep.planning.shapes import shapes_of
from lightning_moe_ep.tools.plan.apart import ApartError, run_apart
from lightning_moe_ep.tools.plan.exact import parallelized, resident_exactly
from lightning_moe_ep.tools.plan.memory import Resident, resident
from lightning_moe_ep.tools.plan.states import observe_states
from tests.pool import RankPool
from tests.tools.plan.runs import Run, on_meta
from tests.tools.plan.test_memory import MORE_ON_4, ON_4, planned

# A whole plan of Qwen3-30B-A3B compares this, too.
LARGE = {
    "qwen3_235b_a22b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {"model_type": "deepseek_v3"},
}


def large(name: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**LARGE[name]))


def all_of(runs: list[Run]) -> tuple[int, list[Resident]]:
    """In another process, for its rank."""
    return os.getpid(), [
        parallelized(partial(on_meta, run), run.layout, run.precision, run.strategy, None) for run in runs
    ]


@pytest.mark.usefixtures("new_processes")
def test_parallelize_keeps_what_arithmetic_says() -> None:
    named, rank = {**ON_4, **MORE_ON_4}, 3
    runs = list(named.values())
    process, exact = run_apart(4, rank, all_of, runs)
    assert process != os.getpid() and not dist.is_initialized()
    for name, run, found in zip(named, runs, exact, strict=True):
        assert found == planned(run)[rank], name


def _beside_a_real_group() -> tuple[str, str]:
    before = dist.get_backend()
    run = Run(model={"num_experts": 3})
    with pytest.raises(ApartError) as error:
        resident_exactly(partial(on_meta, run), run.layout)
    everyone = torch.ones(())
    dist.all_reduce(everyone)
    assert dist.get_backend() == before and everyone == dist.get_world_size()
    return str(error.value), "".join(error.value.__notes__)


@pytest.mark.more
def test_a_real_process_group_is_not_disturbed(ranks: RankPool) -> None:
    ((told, stack),) = ranks.run(_beside_a_real_group, world=1, timeout=180)
    assert told.startswith("ValueError: ep=2 does not divide the 3 experts of model.model.layers.0.mlp.experts;")
    assert "check_experts" in stack


@pytest.mark.more
@pytest.mark.parametrize("name", LARGE)
def test_large_models_at_512_ranks(name: str) -> None:
    layout = Layout.for_world(512, ep=8)
    model = large(name)
    shapes = shapes_of(model, precision="bf16-mixed")
    plan = resident(shapes, observe_states(model), layout)
    exact = resident_exactly(partial(large, name), layout, precision="bf16-mixed")
    assert dataclasses.asdict(exact) == dataclasses.asdict(plan)
