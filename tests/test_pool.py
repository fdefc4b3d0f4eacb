from __future__ import annotations

import os
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


def _abort_at_first(folder: Path, always: bool) -> None:
    if always or not (folder / "tried").exists():
        (folder / "tried").touch()
        os.abort()


def test_a_job_whose_rank_aborts_runs_again_and_it_is_told(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"(?s)rank 0 died of SIGABRT.*in _abort_at_first.*once more"):
        assert ranks.run(_abort_at_first, tmp_path, False, world=1) == [None]
    with pytest.warns(UserWarning, match="once more"), pytest.raises(RankError, match="rank 0 died of SIGABRT"):
        ranks.run(_abort_at_first, tmp_path, True, world=1)
