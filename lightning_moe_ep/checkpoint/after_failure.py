"""Whether a checkpoint can be saved after an exception: only if every rank is there and has come equally far.

Ranks tell each other through the store of the process group, as a collective would wait for one that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from lightning_moe_ep.mesh import default_store

PATIENCE = 3.0
"""Seconds that rank 0 waits for the others; they wait twice as long for its word, which is less than `launch` waits."""

_SAVE = "save"


def why_not_to_save(step: int, groups: Sequence[dist.ProcessGroup]) -> str | None:
    """What stands against a save that all ranks take part in; None, on all ranks, if nothing does.

    Args:
        step: optimizer steps taken; ranks that differ do not save.
        groups: what the ranks communicate over; nor do those that have begun other numbers of collectives.

    Returns:
        The reason, in words that follow "not saved:".
    """
    world, rank, store = dist.get_world_size(), dist.get_rank(), default_store()
    here = f"{step}/{'/'.join(str(group._get_sequence_number_for_group()) for group in groups)}"
    # Ranks that stand elsewhere do not meet here, nor does one that asked when another did not.
    key = f"moe_ep/save_after_failure/{here}"
    key = f"{key}/{store.add(f'{key}/asked by {rank}', 1)}"
    store.set(f"{key}/{rank}", "")
    if rank == 0:
        word = _word_of_rank_0(store, [f"{key}/{other}" for other in range(world)])
    elif _wait(store, [f"{key}/word"], 2 * PATIENCE):
        word = ""
    else:
        word = f"rank {rank} had no word from rank 0 within {2 * PATIENCE:.0f} s"
    # The first to write it decides for all, so that none saves while another has given up.
    said = store.compare_set(f"{key}/word", "", word).decode() if word else store.get(f"{key}/word").decode()
    return None if said == _SAVE else said


def _word_of_rank_0(store: dist.Store, keys: Sequence[str]) -> str:
    if _wait(store, keys, PATIENCE):
        return _SAVE
    missing = [number for number, key in enumerate(keys) if not store.check([key])]
    return f"rank(s) {missing} did not come to save within {PATIENCE:.0f} s, or stand at another point of the step"


def _wait(store: dist.Store, keys: Sequence[str], seconds: float) -> bool:
    # Not the store's own waiting, which keeps other threads from it.
    end = time.monotonic() + seconds
    while not store.check(list(keys)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
