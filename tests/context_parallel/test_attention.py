"""Attention over whole sequences on ranks that hold slices: gradients and norms are those of one process."""

from __future__ import annotations

import pytest

from tests.context_parallel.parity import MODELS, CPCase, check
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
