"""Gradients, norms and weights against one process, through a real Trainer."""

from __future__ import annotations

import pytest

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
@pytest.mark.parametrize("layout", LAYOUTS)
def test_family(ranks: RankPool, family: str, layout: str) -> None:
    check(ranks, Case(kind=family, steps=3, clip=0.1, **LAYOUTS[layout]))
