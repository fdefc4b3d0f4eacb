"""What the ranks of a node read ahead, and that all of them do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_moe_ep.checkpoint import prefetch as module
from lightning_moe_ep.checkpoint.prefetch import SEEK_COST, Span, cost, joined, prefetch, share
from tests.pool import RankPool

ONE, OTHER = Path("one"), Path("other")


def test_spans_that_lie_close_are_joined() -> None:
    spans = [Span(OTHER, 0, 5), Span(ONE, 20, 30), Span(ONE, 0, 10), Span(ONE, 5, 8), Span(ONE, 41, 50)]
    assert joined(spans, gap=10) == [Span(ONE, 0, 30), Span(ONE, 41, 50), Span(OTHER, 0, 5)]
    assert joined(spans, gap=11) == [Span(ONE, 0, 50), Span(OTHER, 0, 5)]
    assert cost([Span(ONE, 0, 30), Span(ONE, 41, 50)]) == 39 + 2 * SEEK_COST


@pytest.mark.parametrize("of", [1, 2, 3, 7, 60])
def test_shares_are_equal_and_make_up_the_whole(of: int) -> None:
    spans = [Span(ONE, 0, 30), Span(ONE, 41, 50), Span(OTHER, 7, 7), Span(OTHER, 9, 17)]
    shares = [share(spans, number, of) for number in range(of)]
    together = [span for mine in shares for span in mine]
    wanted, got = ([(s.file, byte) for s in some for byte in range(s.start, s.stop)] for some in (spans, together))
    assert wanted == got
    sizes = [sum(span.nbytes for span in mine) for mine in shares]
    assert max(sizes) - min(sizes) <= 1


def read_by_ranks(folder: Path, changes: dict[str, Any], other_host: bool, cheaper: bool) -> list[tuple[str, int, int]]:
    """On a rank: which spans it reads of two files of 1000 bytes, each rank needing some of the first."""
    files = [folder / "one", folder / "two"]
    seen: list[tuple[str, int, int]] = []
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEEK_COST", 10)
        for name, value in changes.items():
            patch.setattr(module, name, value)
        patch.setattr(module, "joined", lambda spans: joined(spans, 10))
        if other_host and rank:
            patch.setattr(module.socket, "gethostname", lambda: "elsewhere")
        if not cheaper and rank:
            patch.setattr(module, "cost", lambda spans: -len(spans))  # this rank finds whole files cheaper
        patch.setattr(module, "read_ahead", lambda span, wait: seen.append((span.file.name, span.start, span.stop)))
        total = prefetch(lambda other: [Span(files[0], 300 * other, 300 * other + 200)], files)
    assert total == sum(stop - start for _, start, stop in seen)
    return seen


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(1000))
    return tmp_path


def test_ranks_of_a_node_share_what_they_need(ranks: RankPool, folder: Path) -> None:
    seen = ranks.run(read_by_ranks, folder, {}, False, True, world=2)
    assert seen == [[("one", 0, 200)], [("one", 300, 500)]]


def test_ranks_of_two_nodes_read_each_their_own(ranks: RankPool, folder: Path) -> None:
    seen = ranks.run(read_by_ranks, folder, {}, True, True, world=3)
    assert seen == [[("one", 0, 200)], [("one", 300, 500)], [("one", 600, 800)]]


def test_where_one_rank_disagrees_all_read_whole_files(ranks: RankPool, folder: Path) -> None:
    seen = ranks.run(read_by_ranks, folder, {}, False, False, world=2)
    assert seen == [[("one", 0, 1000)], [("two", 0, 1000)]]


def test_nothing_is_read_that_memory_would_not_hold(ranks: RankPool, folder: Path) -> None:
    assert ranks.run(read_by_ranks, folder, {"MEMORY_SHARE": 0.0}, False, True, world=2) == [[], []]


def _one_rank_cannot_read(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(module, "read_ahead", lambda span, wait: (folder / "nothing").read_bytes())
        return prefetch(lambda other: [Span(folder / "gone", 0, 10)], [folder / "gone", folder / "one"])


def test_a_rank_that_cannot_read_leaves_no_other_waiting(ranks: RankPool, folder: Path) -> None:
    (folder / "gone").write_bytes(bytes(10))
    assert sum(ranks.run(_one_rank_cannot_read, folder, world=2)) == 10


@pytest.mark.parametrize("wait", [True, False])
def test_reading_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    monkeypatch.setattr(module, "PIECE", 64)
    advised, pieces = [], []
    (tmp_path / "one").write_bytes(bytes(1000))
    preadv = module.os.preadv
    monkeypatch.setattr(module.os, "posix_fadvise", lambda fd, start, size, advice: advised.append((start, size)))
    monkeypatch.setattr(
        module.os, "preadv", lambda fd, buffers, at: pieces.append((at, len(buffers[0]))) or preadv(fd, buffers, at)
    )
    module.read_ahead(Span(tmp_path / "one", 100, 300), wait=wait)
    assert advised == ([] if wait else [(100, 200)])
    assert pieces == ([(100, 64), (164, 64), (228, 64), (292, 8)] if wait else [])


def test_free_memory_is_known() -> None:
    assert 2**20 < module.free_memory() < 2**50
