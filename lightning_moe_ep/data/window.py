"""Knows, before a gradient-accumulation window starts, how many tokens it holds over the whole world.

In goes a loader of batches. Out come the same batches, one by one, each marked with the token count of its
window summed over all ranks, so that a loss summed over tokens and divided by it is the exact mean.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import lightning.pytorch as L

from lightning_moe_ep.data.around import LoaderAround


def count_ahead(loader: object, module: L.LightningModule, *, sum_over_world: Callable[[int], int]) -> object:
    """The loader, wrapped in a `WindowedLoader` if the module trains and has `count_tokens(batch)`."""
    count = getattr(module, "count_tokens", None)
    if count is None or not module.trainer.training:
        return loader
    return WindowedLoader(
        cast(Iterable[Any], loader),
        count=count,
        accumulate=lambda: micro_batches_ahead(module.trainer),
        sum_over_world=sum_over_world,
    )


class WindowedLoader(LoaderAround):
    """Looks one accumulation window ahead and tells each batch how many items the window holds.

    Each batch leaves as a shallow `dict` copy with two more entries, both Python ints: `num_items_in_batch`,
    the items of the whole window over the whole world, and `num_micro_batches`, the batches in the window.

    A loader that keeps its position (`state_dict`) is as far as the window it has read: a checkpoint taken
    between two optimizer steps continues exactly, one taken inside a window skips the rest of it.

    Args:
        loader: what yields the batches, each a mapping; it may have a length or not.
        count: the items (usually the tokens that have a label) in one batch of this rank.
        accumulate: how many batches the coming optimizer step takes; asked once a window. Under a Lightning
            trainer this is `micro_batches_ahead(trainer)`.
        sum_over_world: the sum of one int per rank; called once a window, so every rank must have equally
            many windows.

    Raises:
        TypeError: a batch is not a mapping.
        ValueError: `accumulate()` is below 1.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        count: Callable[[Mapping[str, Any]], int],
        accumulate: Callable[[], int],
        sum_over_world: Callable[[int], int],
    ) -> None:
        super().__init__(loader, _count=count, _accumulate=accumulate, _sum_over_world=sum_over_world)
        # Lightning tells the loaders that keep their position by a runtime protocol, and from Python 3.12 on
        # isinstance with one does not ask __getattr__. As methods of the class, these two would make every
        # loader seem to keep it.
        for name in ("state_dict", "load_state_dict"):
            if hasattr(loader, name):
                self.__dict__[name] = getattr(loader, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # The inner iterator is made now, not at the first batch: a DataLoader draws its seed from the global
        # generator at that moment, and training with and without this wrapper must draw alike.
        return self._windows(iter(self._loader))

    def _windows(self, batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
        for first in batches:
            size = self._accumulate()
            if size < 1:
                raise ValueError(f"accumulate() returned {size}; a window holds at least 1 batch")
            window = [_mapping(batch) for batch in (first, *itertools.islice(batches, size - 1))]
            marks = {
                "num_items_in_batch": int(self._sum_over_world(sum(int(self._count(batch)) for batch in window))),
                "num_micro_batches": len(window),
            }
            for batch in window:
                yield {**batch, **marks}


def micro_batches_ahead(trainer: L.Trainer) -> int:
    """How many batches the coming optimizer step takes, asked when the first of them is fetched.

    It is `accumulate_grad_batches`, or what `limit_train_batches` and the end of the epoch leave of it:
    Lightning steps at the last batch it takes, and a window that looked past it would count too many tokens.

    Args:
        trainer: the trainer that is fitting.
    """
    window: int = trainer.accumulate_grad_batches
    if math.isinf(trainer.num_training_batches):
        return window
    # Lightning fetches ahead only when it does not know the length, so here `ready` is the number of batches
    # already taken, those before a restart in the middle of an epoch included.
    taken = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    # Counted from the start of the epoch, so a restart with another `accumulate_grad_batches` may be inside a window.
    return max(1, min(window - taken % window, int(trainer.num_training_batches) - taken))


def _mapping(batch: object) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the training loader yielded a {type(batch).__name__}; batches must be mappings (such as "
            '{"input_ids": ..., "labels": ...}) to carry the token count of their window: return a dict from '
            "the collate function"
        )
    return cast(Mapping[str, Any], batch)
