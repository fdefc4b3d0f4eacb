"""All ranks take equally many batches, as a rank that stops early leaves the others waiting in a collective.

In goes a loader of each rank. Out comes one that ends on all ranks at once, where the first rank has no more. What
ranks have is agreed before the loop begins; where that is sure and equal, and no ranks share batches (cp > 1), nothing
more is ever sent. Elsewhere one message over the host goes with each batch; in training, with each
gradient-accumulation window, and it carries the window's tokens too, if the module counts them. So a loss summed over
tokens and divided by `num_items_in_batch` is the exact mean over the window and the world.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import lightning.pytorch as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_moe_ep.data.alike import raise_unlike, unlike
from lightning_moe_ep.data.around import LoaderAround
from lightning_moe_ep.data.host import Host, name_ranks, raise_together
from lightning_moe_ep.data.position import RemainingSamples
from lightning_moe_ep.data.split import warn_of_equal_batches
from lightning_moe_ep.data.window import WindowsAhead

Uneven = Literal["stop", "error"]
"""What comes of unequal numbers of batches: all ranks stop with the first that has no more, or raise an error."""


@dataclass(frozen=True)
class Lengths:
    """The numbers of batches of all ranks, as far as they are known before any is read."""

    of_ranks: list[int | None]
    """What `len` says on each rank; None where there is none."""

    exact: bool
    """Whether that is what each rank will get."""

    @property
    def known(self) -> list[int] | None:
        """Those of all ranks, if every rank has one."""
        known = [length for length in self.of_ranks if length is not None]
        return known if len(known) == len(self.of_ranks) else None

    @property
    def sure(self) -> bool:
        """Whether all ranks will get equally many batches."""
        return self.exact and len(set(self.of_ranks)) == 1


def agree(loader: object, host: Host, name: str) -> Lengths:
    """Learn how many batches each rank has.

    Raises:
        Exception: what `len(loader)` raised on this rank, or a RuntimeError that names another on which it did.
    """
    length, error = None, None
    try:
        length = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        pass  # it has none
    except Exception as raised:
        error = raised
    told = host.gather((length, counts_exactly(loader), error is not None))
    if any(failed for _, _, failed in told):
        raise_together(host, error, name)
    lengths = [length for length, _, _ in told]
    return Lengths(lengths, exact=None not in lengths and all(exact for _, exact, _ in told))


def counts_exactly(loader: object) -> bool:
    """Whether `len(loader)` is sure to be what it gives: not for a stream, nor where classes of a user's own count."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if (type(loader).__iter__, type(loader).__len__) != (DataLoader.__iter__, DataLoader.__len__):
        return False
    batches = loader.batch_sampler
    # Lightning stands around it in `predict`, to keep the indices.
    if batches is not None and type(getattr(batches, "_batch_sampler", batches)) is not BatchSampler:
        return False
    sampler = loader.sampler if batches is None else batches.sampler
    return isinstance(sampler, RemainingSamples) or type(sampler).__module__.split(".")[0] in ("torch", "lightning")


def check_lengths(lengths: Lengths, name: str, uneven: Uneven) -> int | None:
    """How many batches all ranks can take; None if some rank does not know. Every rank gets the same answer.

    Raises:
        ValueError: they are sure to have unequally many, and that is an error, or one has none at all.
    """
    if lengths.known is None:
        return None
    fewest = min(lengths.known)
    if lengths.exact and not lengths.sure:
        _tell(name, lengths.known, uneven)
    return fewest


def in_lockstep(
    loader: object, lengths: Lengths, trainer: L.Trainer, *, host: Host, name: str, uneven: Uneven
) -> object:
    """The loader, in a `LockstepLoader` if it may have unlike lengths, if the module trains and counts its tokens, or
    if ranks share batches.

    Args:
        loader: of training, validation or test.
        lengths: what ranks have agreed.
        trainer: whose loader it is; the module may have `count_tokens(batch)`.
        host: all ranks.
        name: what the loader is called in messages.
        uneven: what comes of unequal numbers of batches.

    Raises:
        ValueError: ranks have unequally many, and that is an error, or one has none at all.
    """
    count = getattr(trainer.lightning_module, "count_tokens", None) if trainer.training else None
    if count is None and (lengths.sure or host.size == 1) and host.cp == 1:
        return loader
    return LockstepLoader(
        cast(Iterable[Any], loader),
        host=host,
        name=name,
        length=check_lengths(lengths, name, uneven),
        window=WindowsAhead(trainer) if trainer.training else (lambda given: 1),
        count=count,
        uneven=uneven,
        compare=not lengths.exact and host.size > 1,
    )


class LockstepLoader(LoaderAround):
    """Ends on all ranks at once, and tells each batch of a window what the window holds.

    With `count`, each batch leaves as a shallow `dict` copy with two more entries, both Python ints:
    `num_items_in_batch`, the items of the whole window over the whole world, and `num_micro_batches`, the batches in
    the window. Without, batches leave as they are.

    A loader that keeps its position (`state_dict`) is as far as the window it has read: a checkpoint taken between two
    optimizer steps continues exactly, one taken inside a window skips the rest of it.

    Args:
        loader: this rank's.
        host: all ranks.
        name: what the loader is called in messages, such as "train_dataloader".
        length: the batches that each rank takes at most; None: nobody knows.
        window: from how many batches have been given to how many the coming message is about; asked once a message,
            with the same answer on all ranks. In training it is the optimizer step's.
        count: the items (usually the tokens that have a label) in one batch of this rank.
        uneven: what comes of a rank that has no more batches while others do.
        compare: whether to warn of ranks that begin with the same batch.

    Raises:
        Exception: what the loader, or `count`, raised on this rank; on other ranks, a RuntimeError that names it.
        TypeError: a batch is to be marked, but is not a mapping.
        ValueError: ranks have unequally many batches, and that is an error, or one has none at all; or ranks of one cp
            group have unlike ones.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        host: Host,
        name: str,
        length: int | None,
        window: Callable[[int], int],
        count: Callable[[Mapping[str, Any]], int] | None = None,
        uneven: Uneven = "stop",
        compare: bool = False,
    ) -> None:
        super().__init__(
            loader,
            _host=host,
            _name=name,
            _length=length,
            _window=window,
            _count=count,
            _uneven=uneven,
            _compare=compare,
        )
        # Lightning tells the loaders that keep their position by a runtime protocol, and from Python 3.12 on
        # isinstance with one does not ask __getattr__. As methods of the class, these two would make every
        # loader seem to keep it.
        for method in ("state_dict", "load_state_dict"):
            if hasattr(loader, method):
                self.__dict__[method] = getattr(loader, method)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the number of batches of the {self._name} is not known")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # The inner iterator is made now, not at the first batch: a DataLoader draws its seed from the global
        # generator at that moment, and training with and without this wrapper must draw alike.
        return self._windows(start(self._loader))

    def _windows(self, batches: Iterator[Any]) -> Iterator[Any]:
        given = 0
        while self._length is None or given < self._length:
            size = self._window(given)
            if size < 1:
                raise ValueError(f"window() returned {size}; a window holds at least 1 batch")
            if self._length is not None:
                size = min(size, self._length - given)
            window, counts, error = self._read(batches, size)
            has = [number < len(window) for number in range(size)]
            counts += [0] * (size - len(counts))
            shared = unlike(self._host, window)
            failed, *sums = self._host.sum([error is not None, *has, *counts, *shared])
            if failed:
                raise_together(self._host, error, self._name)
            if shared and sums.pop():
                raise_unlike(self._host, window, self._name)
            if self._compare:
                self.__dict__["_compare"] = False
                warn_of_equal_batches(self._host, window[:1], self._name)
            common = sums[:size].count(self._host.size)  # what all ranks have
            if any(0 < holders < self._host.size for holders in sums[:size]):
                held = [given + number for number in self._host.gather(len(window))]
                _tell(self._name, held, self._uneven, unread=True)
            if common < size and self._length is not None:
                self._leave_out(given, common)
                return
            yield from self._marked(window[:common], sum(sums[size : size + common]) // self._host.cp)
            given += common
            if common < size:
                return

    def _read(self, batches: Iterator[Any], size: int) -> tuple[list[Any], list[int], Exception | None]:
        """Up to `size` batches, the items in each, and what went wrong, which the other ranks have to know."""
        window: list[Any] = []
        counts: list[int] = []
        try:
            for batch in itertools.islice(batches, size):
                window.append(batch)
                if self._count is not None:
                    counts.append(int(self._count(_mapping(batch))))
        except Exception as error:
            return window, counts, error
        return window, counts, None

    def _marked(self, window: list[Any], items: int) -> Iterator[Any]:
        if self._count is None:
            yield from window
            return
        marks = {"num_items_in_batch": items, "num_micro_batches": len(window)}
        for batch in window:
            yield {**batch, **marks}

    def _leave_out(self, given: int, common: int) -> None:
        """Lightning makes an optimizer step of a window that the end cuts short only if it knew where the end is."""
        if common:
            rank_zero_warn(
                f"the {self._name} ended after {given + common} batches, and not after {self._length} as its len()"
                f" says; the last {common} do not fill an optimizer step and are left out"
            )


def _tell(name: str, held: list[int], uneven: Uneven, *, unread: bool = False) -> None:
    """Say which ranks have the fewest batches, and what the others drop.

    Args:
        name: of the loader.
        held: the batches of each rank, unequally many.
        uneven: what comes of it.
        unread: whether ranks may have more than that, which they have not read.

    Raises:
        ValueError: that is an error, or there are ranks without any.
    """
    fewest = min(held)
    short = name_ranks([rank for rank, number in enumerate(held) if number == fewest])
    others = [rank for rank, number in enumerate(held) if number > fewest]
    more = sorted({held[rank] - fewest for rank in others})
    number = f"{'at least ' * unread}{' to '.join(str(count) for count in dict.fromkeys((more[0], more[-1])))} more"
    text = f"the {name}s have unequal numbers of batches: {short} ran out after {fewest}, where"
    text += f" {name_ranks(others)} had {number}"
    if uneven == "error":
        raise ValueError(f"{text}; give each rank equally many, or use uneven='stop' to drop those")
    if not fewest:
        raise ValueError(f"{text}; give each rank one at least")
    rank_zero_warn(f"{text}; all ranks stop there, and those are dropped")


def start(loader: Iterable[Any]) -> Iterator[Any]:
    """An iterator; if there can be none, one that raises why, when it is asked for a batch."""
    try:
        return iter(loader)
    except Exception as error:
        return _raising(error)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _mapping(batch: object) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the training loader yielded a {type(batch).__name__}; batches must be mappings (such as "
            '{"input_ids": ..., "labels": ...}) to carry the token count of their window: return a dict from '
            "the collate function"
        )
    return cast(Mapping[str, Any], batch)
