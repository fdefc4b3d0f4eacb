"""Reading a model's files ahead of their use: the ranks of a node bring what they need into its page cache together.

What a node's ranks will read is known beforehand, as byte ranges. Ranges that lie close are joined, since a seek costs
as much as reading what is between; the ranks take equal shares. Reading whole files takes the place of that where it
is cheaper, or where any rank finds it so: all ranks do the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lightning_moe_ep.checkpoint.agreement import on_every_rank

SEEK_COST = 12 * 2**20
"""Bytes that could be read in the time of a seek. Gaps up to this are read, too."""

ADVISED = 5 * 2**30
"""Bytes of a node up to which the operating system is asked to read ahead; more is read here, piece by piece."""

PIECE = 16 * 2**20
"""Bytes that are read at once."""

MEMORY_SHARE = 0.5
"""Of the memory that is free on a node: what may be read ahead at most. If it is more, nothing is."""


@dataclass(frozen=True, order=True)
class Span:
    """A byte range of a file."""

    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def joined(spans: Iterable[Span], gap: int = SEEK_COST) -> list[Span]:
    """The same bytes in order, with those between two spans that are at most `gap` bytes apart."""
    result: list[Span] = []
    for span in sorted(spans):
        if result and result[-1].file == span.file and span.start - result[-1].stop <= gap:
            last = result.pop()
            span = Span(span.file, last.start, max(last.stop, span.stop))
        result.append(span)
    return result


def cost(spans: Sequence[Span]) -> int:
    """What reading takes, as a number of bytes: those of the spans, and a seek for each."""
    return sum(span.nbytes for span in spans) + SEEK_COST * len(spans)


def share(spans: Sequence[Span], number: int, of: int) -> list[Span]:
    """The part of `spans` that is one of `of` parts of equal size."""
    total = sum(span.nbytes for span in spans)
    first, last = total * number // of, total * (number + 1) // of
    mine, before = [], 0
    for span in spans:
        start, stop = max(first - before, 0), min(last - before, span.nbytes)
        if start < stop:
            mine.append(Span(span.file, span.start + start, span.start + stop))
        before += span.nbytes
    return mine


def prefetch(needed_by: Callable[[int], Iterable[Span]], files: Sequence[Path]) -> int:
    """Have the ranks of each node read ahead, together; every rank calls this.

    Args:
        needed_by: what a rank will read, by its number in the world.
        files: all files of the model.

    Returns:
        The bytes that this rank read ahead, those of bridged gaps among them; 0 if there is no room for it.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    hosts = on_every_rank(socket.gethostname)
    neighbours = [other for other in range(world) if hosts[other] == hosts[rank]]
    spans = joined(span for other in neighbours for span in needed_by(other))
    entire = [Span(file, 0, _size(file)) for file in files]
    if not all(on_every_rank(lambda: cost(spans) < cost(entire))):
        spans = entire
    total = sum(span.nbytes for span in spans)
    if not all(on_every_rank(lambda: total <= MEMORY_SHARE * free_memory())):
        return 0
    mine = share(spans, neighbours.index(rank), len(neighbours))
    for span in mine:
        with suppress(OSError):  # reading itself will tell, on all ranks
            read_ahead(span, wait=total > ADVISED)
    on_every_rank(lambda: None)  # no rank starts to read before all of it is on its way
    return sum(span.nbytes for span in mine)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def read_ahead(span: Span, *, wait: bool) -> None:
    """Have the bytes of a span in the page cache, or on their way there if not `wait`."""
    descriptor = os.open(span.file, os.O_RDONLY)
    try:
        if not wait and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, span.start, span.nbytes, os.POSIX_FADV_WILLNEED)
            return
        buffer = bytearray(PIECE)
        for start in range(span.start, span.stop, PIECE):
            os.preadv(descriptor, [memoryview(buffer)[: span.stop - start]], start)
    finally:
        os.close(descriptor)


def free_memory() -> int:
    """Bytes that can be had without swapping, the page cache among them."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
