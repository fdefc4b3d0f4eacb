"""Routing that is worked out once, also where activation checkpointing runs a forward twice.

    torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False, context_fn=remember_routing)

What a dispatcher agrees on with other ranks and asks of the host is kept from the forward and used again when it is
recomputed: no count is exchanged twice, nothing waits for the host in backward, and a near tie that would fall the
other way the second time cannot change which rows travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_answers: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("answers", default=None)
"""In a checkpointed region: what to make of a question's answer."""


def remember_routing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` for `torch.utils.checkpoint.checkpoint`: contexts for the forward and for its recomputation."""
    memory: list[Any] = []
    remembered: Iterator[Any] = iter(())

    def record(question: Callable[[], Any]) -> Any:
        memory.append(question())
        return memory[-1]

    def replay(question: Callable[[], Any]) -> Any:
        return next(remembered)

    @contextmanager
    def recomputing() -> Iterator[None]:
        nonlocal remembered
        remembered = iter(memory)  # from the start: a graph that is kept may be recomputed again
        with _answering(replay):
            yield

    return _answering(record), recomputing()


def once(question: Callable[[], T]) -> T:
    """The answer to `question`: asked, or remembered where the forward that asked it is being recomputed."""
    answer = _answers.get()
    return question() if answer is None else answer(question)


@contextmanager
def _answering(answer: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    token = _answers.set(answer)
    try:
        yield
    finally:
        _answers.reset(token)
