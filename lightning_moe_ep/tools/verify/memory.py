"""Whether what is compared fits into memory, before it is there."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_moe_ep.layout import Layout

HOST_COPIES = 24
"""fp32 copies of all parameters on rank 0's host. For each of two steps: weights before and after, gradients before and
after the clip, two moments before and after; and what is right of gradients, weights and two moments."""

TRAINED = 4
"""The weights, their gradients, and an optimizer's two moments."""

GATHERED = 2
"""The whole weights and gradients of a block, at most of all of them."""


def check_memory(model: nn.Module, layout: Layout, device: torch.device, *, ranks_on_node: int) -> None:
    """Compare what the steps need with what there is; on every rank, which all raise together.

    Activations are the user's own batches' and not counted.

    Raises:
        ValueError: it is too much; has the numbers.
    """
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    on_rank = whole * TRAINED // layout.fsdp + whole * GATHERED
    host = whole * HOST_COPIES
    problems = []
    if device.type == "cuda":
        # Rank 0's device has the single process, too, but after the others are done.
        needed = max(on_rank, whole * (TRAINED + 1))
        free = torch.cuda.mem_get_info(device)[0]
        if needed > free:
            problems.append(f"{_size(needed)} on {device}, where {_size(free)} are free")
    else:
        host += max(on_rank * ranks_on_node, whole * (TRAINED + 1))
    available = _available()
    if dist.get_rank() == 0 and available is not None and host > available:
        problems.append(f"{_size(host)} of the host's memory, where {_size(available)} are available")
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, problems)
    if lacking := [f"{problem} (rank {rank})" for rank, of_rank in enumerate(told) for problem in of_rank]:
        raise ValueError(
            f"the cut model has {whole // 4:,} parameters, and comparing it needs {lacking[0]}; keep fewer --layers, or"
            " make the model smaller with --experts or --width"
        )


def _available() -> int | None:
    """Bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    try:  # of a container
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return limit - used if available is None else min(available, limit - used)


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB"
