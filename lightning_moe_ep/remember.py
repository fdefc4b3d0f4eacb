"""What is worked out once, also where activation checkpointing runs a forward twice: routing, and rows exchanged.

    torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False, context_fn=remember_routing)

What routers choose, and what a dispatcher agrees on with other ranks and asks of the host, is kept from the forward and
used again when it is recomputed: no count is exchanged twice, nothing waits for the host in backward, and a near tie
that would fall the other way the second time changes neither which rows travel nor which weights they are given.
With `remember_exchange` the rows themselves are kept, too, so that recomputing exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


@dataclass(frozen=True)
class _Region:
    """A checkpointed region that is running."""

    answer: Callable[[Callable[[], Any]], Any]
    """What to make of a question's answer."""

    keeps_rows: bool


_region: ContextVar[_Region | None] = ContextVar("region", default=None)


def remember_routing() -> Contexts:
    """The `context_fn` for `torch.utils.checkpoint.checkpoint`: contexts for the forward and for its recomputation."""
    return _remembering(keeps_rows=False)


def remember_exchange() -> Contexts:
    """As `remember_routing`, and keeps the rows that came from other ranks, `[R, H]` and `[T, H]` an experts layer.

    What is recomputed then has no collective in it, but for FSDP2's.
    """
    return _remembering(keeps_rows=True)


def once(question: Callable[[], T]) -> T:
    """The answer to `question`: asked, or remembered where the forward that asked it is being recomputed."""
    region = _region.get()
    return question() if region is None else region.answer(question)


def exchanged_once(exchange: Callable[[], T]) -> T:
    """What came of `exchange`: run, or remembered where a forward that keeps its rows is being recomputed."""
    region = _region.get()
    return exchange() if region is None or not region.keeps_rows else region.answer(exchange)


def is_remembering() -> bool:
    """Whether what is asked now is kept, or remembered."""
    return _region.get() is not None


@contextmanager
def unremembered() -> Iterator[None]:
    """What is asked inside is neither kept nor remembered: for what runs in the forward, but not in a recomputation."""
    token = _region.set(None)
    try:
        yield
    finally:
        _region.reset(token)


def _remembering(*, keeps_rows: bool) -> Contexts:
    memory: list[Any] = []
    remembered: Iterator[Any] = iter(())

    def record(question: Callable[[], Any]) -> Any:
        with unremembered():  # what a question asks on its way is part of its own answer
            memory.append(question())
        return memory[-1]

    def replay(question: Callable[[], Any]) -> Any:
        return next(remembered)

    def start_over() -> None:
        nonlocal remembered
        remembered = iter(memory)  # a graph that is kept is recomputed again in each backward through it

    return _Inside(_Region(record, keeps_rows)), _Inside(_Region(replay, keeps_rows), start_over)


class _Inside(AbstractContextManager[None]):
    """Makes a region the one that is running; may be entered again and again."""

    def __init__(self, region: _Region, starts: Callable[[], None] = lambda: None) -> None:
        self._region, self._starts = region, starts
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        self._starts()
        with ExitStack() as stack:
            token = _region.set(self._region)
            stack.callback(_region.reset, token)
            stack.enter_context(_SameChoices())
            self._open.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._open.pop().close()


class _SameChoices(TorchFunctionMode):
    """Has `topk` and `max`, by which routers choose, choose in a recomputation what they chose in the forward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What is compiled is the same code both times, and cannot be told at run time what to choose.
        if torch.compiler.is_compiling() or func not in _CHOOSING or _region.get() is None:
            return func(*args, **kwargs)
        dim = _dim(func, args, kwargs)
        if dim is None:
            return func(*args, **kwargs)
        with torch.no_grad():
            # Asked for what it returns, and not for its indices alone, because that is a type of its own.
            of_type, chosen = once(lambda: _choice(func(*args, **kwargs)))
        # The same way both times: autograd has to keep equally many tensors.
        source: Tensor = args[0] if args else kwargs["input"]
        if chosen.ndim == source.ndim:
            return of_type((source.gather(dim, chosen), chosen))
        return of_type((source.gather(dim, chosen.unsqueeze(dim)).squeeze(dim), chosen))


def _choice(output: Any) -> tuple[Any, Tensor]:
    return type(output), output.indices.clone()  # a copy: the model may write into its own


_TOPK, _MAX = (torch.topk, Tensor.topk), (torch.max, Tensor.max)
_CHOOSING = {*_TOPK, *_MAX}


def _dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Along which dimension `topk(input, k, dim)` or `max(input, dim)` chooses; None: it is another `max`."""
    place, otherwise = (2, -1) if func in _TOPK else (1, None)
    dim = args[place] if len(args) > place else kwargs.get("dim", otherwise)
    return dim if isinstance(dim, int) else None
