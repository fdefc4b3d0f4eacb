"""What users see, and when, if one rank fails: real ranks, and a real script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract import contract
from tests.launch.ranks import ended, start
from tests.matrix import mostly_more

SECONDS = 60.0
"""For a start, a few steps, and the ten seconds in which all have to end; on a machine that does other things."""
NAMED = r"\[rank{}\]: rank {} ended because rank {} failed first: "
FAILED = "failed first"


@contract("Errors", "an exception on one rank", "works: its traceback is printed first; the others end within seconds")
@pytest.mark.parametrize("victim", mostly_more([0, 1], 0))
def test_an_exception_on_one_rank(tmp_path: Path, victim: int) -> None:
    """After a fit that all ranks failed alike, and one that went well."""
    other = 1 - victim
    ranks = start(tmp_path, [("alike", 0), ("well", 0), ("raise", victim)])
    printed, codes = ended(ranks, tmp_path, within=SECONDS)
    assert codes == [1, 1], printed
    alike, well, failed = zip(
        *(re.split(r"(?<=caught ValueError: all of us, rank . too\n)|(?<=fitted\n)", text) for text in printed),
        strict=True,
    )
    for rank, text in enumerate(alike):
        assert text.endswith(f"caught ValueError: all of us, rank {rank} too\n") and "on_exception" in text
    assert sum(text.count("Traceback") for text in alike) == 1
    assert "caught" not in "".join(well)
    assert failed[victim].count("Traceback") == 1
    assert f"[rank{victim}]: {FAILED}\n[rank{victim}]: Traceback" in failed[victim]
    assert re.search(r"in _go_wrong\n.*raise KeyError\(\"boom\"\)\n", failed[victim])
    assert failed[victim].endswith(
        f"caught KeyError: 'boom'\n[rank{victim}]: ended by KeyError: 'boom'; its traceback is above\n"
    )
    because = rf"rank {other} ended because rank {victim} failed first: KeyError: 'boom'; rank {other} was in \w+ \("
    assert re.search(f"caught RankFailedError: {because}", failed[other])
    assert re.fullmatch(rf"\[rank{other}\]: {because}.*", failed[other].splitlines()[-1])
    assert "Traceback" not in failed[other]


@contract("Errors", "an exception that the failed rank's script catches", "works: the other ranks end all the same")
def test_a_rank_that_stays(tmp_path: Path) -> None:
    """Its connections stay open, so that the other waits; as with NCCL."""
    ranks = start(tmp_path, [("hold", 0)])
    _, codes = ended(ranks[1:], tmp_path, within=SECONDS)
    ranks[0].kill()
    assert codes == [1]
    text = (tmp_path / "rank-1").read_text()
    assert re.search(NAMED.format(1, 1, 0) + "KeyError: 'boom'; rank 1 was in .*, called from training_step", text)
    assert "It stands at (most recent call last)" in text and "wait()" in text
    assert "caught KeyError: 'boom'" in (tmp_path / "rank-0").read_text()


@contract("Errors", "a rank that is killed", "works: it is named, with its exit code where its parent is on the node")
def test_a_rank_that_dies(tmp_path: Path) -> None:
    ranks = start(tmp_path, [("kill", 1)])
    printed, codes = ended(ranks, tmp_path, within=SECONDS)
    assert codes == [1, -9]
    assert "[rank0]: rank 1 failed first: its process ended" in printed[0]
    assert re.search("caught RankFailedError: rank 0 ended because rank 1 failed first: its process", printed[0])
    assert re.search("; rank 0 was in .*called from training_step", printed[0])


@pytest.mark.more
@pytest.mark.parametrize(("how", "victim"), [("kill", 0), ("exit", 1), ("raise and wait", 0)])
def test_other_ends(tmp_path: Path, how: str, victim: int) -> None:
    ranks = start(tmp_path, [(how, victim)])
    printed, codes = ended(ranks, tmp_path, within=SECONDS)
    other = 1 - victim
    reason = {"kill": "its process ended", "exit": "SystemExit 0", "raise and wait": "KeyError: 'boom'"}[how]
    assert codes[other] == 1 and codes[victim] == {"kill": -9, "exit": 0, "raise and wait": 1}[how]
    assert f"rank {other} ended because rank {victim} failed first: {reason}" in printed[other]
    if how == "raise and wait":
        assert re.search(r"rank 0 did not end within 7 s of its failure\n(.*\n)*.*in on_exception\n", printed[0])


@pytest.mark.more
@contract("Errors", "a rank that hangs", "works: after the strategy's `timeout` all end, and say where they stand")
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    ranks = start(tmp_path, [("sleep", 1)], timeout=10)
    printed, codes = ended(ranks, tmp_path, within=SECONDS)
    assert codes == [1, 1]
    assert re.search(r"\[rank0\]: RuntimeError: .*Timed out waiting 10000ms", printed[0])
    assert re.search(NAMED.format(1, 1, 0) + "RuntimeError: .*; rank 1 was in _go_wrong", printed[1])
    assert re.search(r"in _go_wrong\n.*time.sleep\(1000\)", printed[1])
