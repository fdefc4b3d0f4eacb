"""Attention over whole sequences on ranks that hold slices: gradients and norms are those of one process."""

from __future__ import annotations

import pytest

from tests.context_parallel.parity import MODELS, CPCase, check
from tests.pool import RankPool


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_parity_on_two_ranks(ranks: RankPool, model: str, ep: int) -> None:
    check(ranks, CPCase(model, ep=ep))
