"""Every Mixture-of-Experts family of transformers in slices: refused by name, or right."""

from __future__ import annotations

import pytest

from tests.context_parallel.families import cp_outcome
from tests.families.find import families
from tests.pool import RankPool


@pytest.mark.sweep
@pytest.mark.parametrize("family", families())
def test_every_family_is_refused_or_right(ranks: RankPool, family: str) -> None:
    result = cp_outcome(ranks, family)
    print(result)
    assert result == "works" or result.startswith("refused: ")
