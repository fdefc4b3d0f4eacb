"""Attention over whole sequences on ranks that hold slices: gradients and norms are those of one process."""

from __future__ import annotations

import pytest

from tests.context_parallel.parity import FLASH, MODELS, CPCase, check
from tests.pool import RankPool


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_parity_on_two_ranks(ranks: RankPool, model: str, ep: int) -> None:
    check(ranks, CPCase(model, ep=ep))


ON_FOUR = [
    CPCase("qwen3_moe", world=4, ep=2),
    CPCase("qwen3_moe", world=4, ep=4),
    CPCase("mixtral", world=4, ep=2, replicate=2),
    CPCase("gpt_oss", world=4, ep=4, batches=("padded", "packed", "left")),
    CPCase("gpt_oss", world=4, cp=4, ep=2),
    CPCase("deepseek_v3", world=4, ep=2),
    CPCase("deepseek_v3", world=4, cp=4),
]


@pytest.mark.parametrize("case", ON_FOUR, ids=lambda case: f"{case.model}-cp{case.cp}-ep{case.ep}")
def test_parity_on_four_ranks(ranks: RankPool, case: CPCase) -> None:
    check(ranks, case)


LONG = {"factor": 4.0, "original_max_position_embeddings": 10, "rope_theta": 1e4}
VARIANTS = [
    CPCase("qwen3_moe", batches=("padded", "packed"), strategy={"activation_checkpointing": "full"}),
    CPCase("gpt_oss", batches=("padded", "packed"), strategy={"activation_checkpointing": "selective"}),
    CPCase(
        "qwen3_moe",
        batches=("odd", "one"),
        options={"rope_parameters": {"rope_type": "dynamic", **LONG}, "max_position_embeddings": 10},
    ),
    CPCase(
        "qwen3_moe",
        batches=("odd", "one"),
        options={
            "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, **LONG}
        },
    ),
    CPCase("deepseek_v3", batches=("padded", "packed"), options={"attention": "eager"}),
    CPCase("qwen3_moe", batches=("padded", "packed"), options={"lora": True}),
    CPCase("gpt_oss", batches=("padded", "left", "packed", "odd"), options={"attention": FLASH}),
    CPCase("mixtral", batches=("padded", "packed"), options={"attention": FLASH}),
]


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: f"{case.model}-{[*case.options, *case.strategy.values()]}")
def test_parity_of_variants(ranks: RankPool, case: CPCase) -> None:
    check(ranks, case)


@pytest.mark.more
def test_parity_of_compiled_blocks(ranks: RankPool) -> None:
    check(ranks, CPCase("gpt_oss", batches=("padded", "packed"), strategy={"compile_blocks": True}), timeout=300)


RINGS = [
    CPCase("qwen3_moe", batches=("even", "odd", "one"), strategy={"cp_mode": "ring"}),
    CPCase("qwen3_moe", world=4, cp=4, ep=2, batches=("even", "odd", "one"), strategy={"cp_mode": "ring"}),
]


@pytest.mark.parametrize("case", RINGS, ids=lambda case: f"cp{case.cp}")
def test_parity_of_rings(ranks: RankPool, case: CPCase) -> None:
    """On CPU by its own flash kernel; what CUDA's kernel hands from forward to backward, only a GPU can show."""
    check(ranks, case)
