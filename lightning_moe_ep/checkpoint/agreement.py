"""What one rank finds, all ranks know: steps that may fail on some ranks end in the same way on all of them.

Every rank calls these; without a process group, the one process there is stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_rank_0(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Do something on rank 0 and return on every rank what came of it.

    Args:
        action: is called on rank 0 only; what it returns or raises is sent to the others.
        group: all ranks; None: the default group.

    Raises:
        Exception: what `action` raised, on every rank.
    """
    if not dist.is_initialized():
        return action()
    outcome = _outcome(action) if dist.get_rank() == 0 else None
    sent = [outcome]
    dist.broadcast_object_list(sent, src=0, group=group)
    assert sent[0] is not None
    result, error = sent[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def on_every_rank(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Do something on every rank and return what came of it on each, in rank order.

    Raises:
        Exception: what `action` raised on the first rank on which it did, on every rank.
    """
    if not dist.is_initialized():
        return [action()]
    outcomes: list[tuple[T | None, BaseException | None] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome(action), group=group)
    results = []
    for outcome in outcomes:
        assert outcome is not None
        if outcome[1] is not None:
            raise outcome[1]
        results.append(outcome[0])
    return results  # type: ignore[return-value]


def together(action: Callable[[], T]) -> T:
    """Do something on every rank and return what came of it here.

    Raises:
        Exception: what `action` raised on the first rank on which it did, on every rank.
    """
    results = []
    on_every_rank(lambda: results.append(action()))
    return results[0]


def _outcome(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:
        # Only what every process can build again is sent as it is.
        return None, error if type(error).__module__ == "builtins" else RuntimeError(f"{type(error).__name__}: {error}")
