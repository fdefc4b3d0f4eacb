from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import NOT_CONNECTED, RankError, RankPool


def _fail_at_first(folder: Path, reason: str) -> int:
    tried = folder / "tried"
    count = len(tried.read_text()) if tried.exists() else 0
    tried.write_text("x" * (count + 1))
    if count == 0:
        raise RuntimeError(reason)
    return count


def test_a_job_that_gloo_could_not_connect_runs_again(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_fail_at_first, tmp_path, f"{NOT_CONNECTED} with [pair.cc:553]", world=1) == [1]


def test_any_other_failure_is_told_at_once(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no luck"):
        ranks.run(_fail_at_first, tmp_path, "no luck", world=1)
    assert (tmp_path / "tried").read_text() == "x"
