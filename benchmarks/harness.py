"""What the benchmarks share: ranks, paired interleaved timing, and counting what is handed to the collectives.

This is a measuring tool, not a test: it prints ratios of medians and never fails on a time.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moe_ep.mesh import let_gloo_finish_at_exit


def on_ranks(function: Callable[..., Any], world: int, *args: Any, backend: str = "gloo") -> Any:
    """Call `function(*args)` on `world` ranks of one thread each, of which each has a GPU if NCCL is among their
    backends; rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(world, folder, function, args, backend), nprocs=world)
        return torch.load(os.path.join(folder, "result"), weights_only=False)


def _rank(
    rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...], backend: str
) -> None:
    torch.set_num_threads(1)
    let_gloo_finish_at_exit()
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    result = function(*args)
    if rank == 0:
        torch.save(result, os.path.join(folder, "result"))
    dist.barrier()
    dist.destroy_process_group()


def interleaved(
    variants: dict[str, Callable[[], Any]],
    *,
    runs: int,
    warmup: int = 3,
    shift: int = 0,
    before: Callable[[], Any] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each run of each variant, from a barrier before to a barrier after; all ranks call this.

    One run of each variant is a round, in an order drawn anew, so that drift and what the one before leaves in caches
    and allocator hit all alike. `before` is called before each, and not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(warmup + runs):
        for name in random.Random(number + shift).sample(names, len(names)):
            if before is not None:
                before()
            dist.barrier()
            start = time.perf_counter()
            variants[name]()
            dist.barrier()
            if number >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def ratio(times: dict[str, list[float]], ours: str, theirs: str) -> float:
    """The ratio of the medians of interleaved runs, ours / theirs."""
    return round(statistics.median(times[ours]) / statistics.median(times[theirs]), 3)


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


@dataclass
class Counts:
    """What one run did."""

    bytes_sent: int = 0
    """Bytes that this rank handed to collectives for other ranks."""

    messages: int = 0
    """Collectives."""

    host_syncs: int = 0
    """Times that the host asked for a value of a device tensor."""


_COLLECTIVES: dict[str, Callable[[dict[str, Any], int], int]] = {
    "all_gather_single": lambda a, size: (size - 1) * _bytes(a["input_tensor"]),
    "reduce_scatter_single": lambda a, size: _bytes(a["input"]) * (size - 1) // size,
    "all_reduce": lambda a, size: 2 * _bytes(a["tensor"]) * (size - 1) // size,
    "all_to_all_single": lambda a, size: _sent(a["input"], a.get("input_split_sizes"), a.get("group")),
}
"""Bytes that a rank sends, from the call's arguments and the size of its group."""


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sent(rows: Tensor, send: list[int] | None, group: dist.ProcessGroup | None) -> int:
    size, me = dist.get_world_size(group), dist.get_rank(group)
    per_row = _bytes(rows) // max(1, rows.shape[0])
    return sum(n for r, n in enumerate(send or [rows.shape[0] // size] * size) if r != me) * per_row


class _FunctionalCollectives(TorchDispatchMode):
    """Counts the functional all-to-all, which transformers uses and which does not go by `torch.distributed`."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            rows, _, send, group = args
            self.counts.bytes_sent += _sent(rows, send, _resolve_process_group(group))
            self.counts.messages += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counts]:
    """Count collectives and host syncs inside. Values that a CPU group exchanged for the host are not syncs."""
    counts = Counts()
    originals: dict[tuple[Any, str], Any] = {}

    def replace(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        originals[owner, name] = getattr(owner, name)
        setattr(owner, name, wrapper(getattr(owner, name)))

    def counting(cost: Callable[[dict[str, Any], int], int]) -> Callable[[Any], Any]:
        def wrap(original: Any) -> Any:
            signature = inspect.signature(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                arguments = signature.bind(*args, **kwargs).arguments
                counts.bytes_sent += cost(arguments, dist.get_world_size(arguments.get("group")))
                counts.messages += 1
                return original(*args, **kwargs)

            return call

        return wrap

    def syncing(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.host_syncs += 1
            return original(*args, **kwargs)

        return call

    from lightning_moe_ep.dispatch import ExpertGroup

    def hidden(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            syncs = counts.host_syncs
            result = original(*args, **kwargs)
            counts.host_syncs = syncs
            return result

        return call

    for name, cost in _COLLECTIVES.items():
        replace(dist, name, counting(cost))
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero", "cpu"):
        replace(Tensor, name, syncing)
    replace(ExpertGroup, "agree_on_tokens", hidden)
    try:
        with _FunctionalCollectives(counts):
            yield counts
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def report(cases: list[dict[str, Any]]) -> None:
    """Print the one JSON object that ends a benchmark's output."""
    print(json.dumps({"cases": cases}))
