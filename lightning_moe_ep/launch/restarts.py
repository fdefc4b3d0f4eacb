"""A process group that knows nothing of the one before, under `torchrun --max-restarts`.

torchrun's agent keeps its store from one start of the ranks to the next (torch 2.13; with `--standalone` and the c10d
rendezvous), and with it the addresses at which the ranks before were to be found: the new ones would try to connect to
these. Its count of restarts is no help, as each agent counts its own.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist

POLL = 0.05
_ROOM = "lightning_moe_ep"


def is_needed() -> bool:
    """Whether the store may have been used before."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get(
        "TORCHELASTIC_MAX_RESTARTS", "0"
    ) not in ("", "0")


def init_process_group(backend: str, *, timeout: timedelta | None, device: torch.device) -> None:
    """As torch's, with torchrun's environment variables.

    Args:
        backend: that of the group.
        timeout: how long a collective may take, and the ranks to come together; None: torch's default.
        device: this rank's.

    Raises:
        torch.distributed.DistError: the ranks did not come together in time.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    waits = timeout or timedelta(minutes=30)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False, timeout=waits
    )
    name = agree_on_name(store, rank, world, waits)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    if "nccl" in backend:  # as Lightning has it: torch warns of a group that is left
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def agree_on_name(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A name that the ranks which ask now have in common, and none that asked before.

    Each asks under a number of its own, so that no answer to an earlier one is taken for its own; rank 0 answers
    whoever asks until all have thanked for this name.

    Raises:
        torch.distributed.DistError: they did not within `timeout`.
    """
    if rank != 0:
        question = secrets.token_hex(8)
        store.set(f"{_ROOM}/asks/{rank}", question)
        store.wait([f"{_ROOM}/answer/{question}"], timeout)
        name = store.get(f"{_ROOM}/answer/{question}").decode()
        store.set(f"{_ROOM}/thanks/{name}/{rank}", "")
        return name
    name = secrets.token_hex(8)
    until = time.monotonic() + timeout.total_seconds()
    missing = set(range(1, world))
    answered: dict[int, bytes] = {}
    while missing:
        for other in sorted(missing):
            if store.check([f"{_ROOM}/thanks/{name}/{other}"]):
                missing.remove(other)
            elif store.check([f"{_ROOM}/asks/{other}"]):
                question_of_other = store.get(f"{_ROOM}/asks/{other}")
                if answered.get(other) != question_of_other:
                    answered[other] = question_of_other
                    store.set(f"{_ROOM}/answer/{question_of_other.decode()}", name)
        if missing and time.monotonic() > until:
            raise dist.DistStoreError(f"rank(s) {sorted(missing)} did not come within {timeout}")
        time.sleep(POLL)
    return name
