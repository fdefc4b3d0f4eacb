"""The ranks of a cp group take the same batches, as each computes a slice of them; that they do is checked.

Slices of unlike sequences give numbers that look right. A message that goes with each batch, or window of batches,
anyway carries one number more for it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor

from lightning_moe_ep.data.host import Host, name_ranks
from lightning_moe_ep.trees import leaves_of

SPLIT = "split_by_rank(dataset, **self.trainer.distributed_sampler_kwargs)"
"""How a stream is split, for messages."""


def unlike(host: Host, batches: list[Any]) -> list[int]:
    """What sums up to 0 over all ranks if those of each cp group have the same batches; nothing at cp=1.

    Args:
        host: all ranks.
        batches: of this rank.
    """
    if host.cp == 1:
        return []
    group, place = divmod(host.rank, host.cp)
    # By a factor of its own, lest what is wrong in one group be made up for in another.
    factor = (group + 1) * (-1 if place else host.cp - 1)
    return [factor * digest_of(batches, waits=False)]


def raise_unlike(host: Host, batches: list[Any], loader: str) -> NoReturn:
    """Raise on every rank, as those of some cp group have unlike batches.

    Args:
        host: all ranks.
        batches: of this rank.
        loader: such as "train_dataloader".

    Raises:
        ValueError: always; names the ranks of the first such group.
    """
    digests = host.gather((len(batches), digest_of(batches, waits=False)))
    groups = [range(start, start + host.cp) for start in range(0, host.size, host.cp)]
    group = next(group for group in groups if len({digests[rank] for rank in group}) > 1)
    raise ValueError(
        f"the {loader}s of {name_ranks(group)} gave them different batches, but these ranks are one cp group (cp="
        f"{host.cp}): each computes a slice of the same sequences. Lightning's sampler deals map-style datasets out"
        f" accordingly; split a stream with `{SPLIT}`, give a sampler of your own these arguments, and have what is"
        " drawn at random in the data drawn alike: seed_everything(seed, workers=True)"
    )


def seed_workers_alike(loader: object, host: Host) -> None:
    """Where Lightning is about to seed a loader's workers by the rank, do so by the cp group.

    Args:
        loader: the innermost.
        host: all ranks.
    """
    if host.cp > 1 and int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(loader, "worker_init_fn", 0) is None:
        loader.worker_init_fn = partial(  # type: ignore[attr-defined]
            pl_worker_init_function, rank=host.rank // host.cp
        )


def digest_of(tree: Any, *, waits: bool = True) -> int:
    """Tells batches apart by their tensors, arrays, numbers and strings; 0 if there are none.

    Args:
        tree: batches.
        waits: for tensors on a device, too; else only their shapes count.
    """
    digest = 0
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            data = str(leaf.shape).encode()
            if waits or leaf.device.type == "cpu":
                with suppress(RuntimeError):  # no bytes can be had of some kinds; other ranks wait for this one
                    data += leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        elif hasattr(leaf, "tobytes"):  # numpy's
            data = leaf.tobytes()
        elif isinstance(leaf, int | float | str):
            data = repr(leaf).encode()
        elif isinstance(leaf, Mapping):  # such as transformers' BatchEncoding
            data = repr(digest_of(dict(leaf), waits=waits)).encode()
        else:
            continue
        digest = zlib.crc32(data, digest)
    return digest
