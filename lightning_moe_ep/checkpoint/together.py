"""Doing something on every rank so that a failure on one stops all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

Result = TypeVar("Result")


def together(act: Callable[[], Result]) -> Result:
    """Act on every rank; where one fails, all raise.

    Raises:
        Exception: what the first rank that failed has raised, on all.
    """
    error: Exception | None = None
    result = None
    try:
        result = act()
    except Exception as raised:
        error = raised
    if dist.is_initialized():
        errors: list[Exception | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error if error is None or _travels(error) else RuntimeError(str(error)))
        error = error or next((raised for raised in errors if raised is not None), None)
    if error is not None:
        raise error
    return cast(Result, result)


def _travels(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
