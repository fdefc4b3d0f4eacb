"""`predict`: every sample once and in order, also where ranks have unequally many.

In goes a loader of each rank. Out comes one that gives the same batches; when a rank has no more and others do, it runs
`predict_step` on its last batch again, with them, as every rank takes part in every forward. The loop knows nothing of
that: no hook is called, and what comes of it is dropped. Of a cp group, whose ranks have the same batches, all but the
first take part in this way, so that each sample is written once.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, RandomSampler

from lightning_moe_ep.data.alike import raise_unlike, unlike
from lightning_moe_ep.data.around import LoaderAround
from lightning_moe_ep.data.host import Host, raise_together
from lightning_moe_ep.data.lockstep import start
from lightning_moe_ep.data.split import warn_of_equal_batches
from lightning_moe_ep.trees import containers_copied

_ENDLESS = 2**40
"""A length that no loop reaches."""


class PredictionLoader(LoaderAround):
    """Has the rank take part in as many forwards as the rank with the most batches.

    Args:
        loader: this rank's.
        host: all ranks.
        trainer: is about to predict.
        name: what the loader is called in messages.
        length: the largest number of batches of a rank; None: nobody knows.
        compare: whether to warn of ranks that begin with the same batch.

    Raises:
        Exception: what the loader raised on this rank; on other ranks, a RuntimeError that names it.
        ValueError: `predict_step` takes a `dataloader_iter`, or ranks of one cp group have unlike batches.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        host: Host,
        trainer: L.Trainer,
        name: str,
        length: int | None,
        compare: bool = False,
    ) -> None:
        if "dataloader_iter" in inspect.signature(trainer.lightning_module.predict_step).parameters:
            raise ValueError(
                "a predict_step that takes dataloader_iter needs the same known number of batches on every rank, and"
                " cp=1, as a rank that has no more has to repeat its last batch; let predict_step take the batch"
            )
        super().__init__(loader, _host=host, _trainer=trainer, _name=name, _length=length, _compare=compare)

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        # Not knowing the length, Lightning would read one batch ahead, and the first before the hooks that begin the
        # loop. A repeated batch must not come before them, so once Lightning has asked for the number of batches,
        # which is left open, the loop is told that there are many.
        if self._trainer.predict_loop._combined_loader is None:
            raise TypeError(f"the number of batches of the {self._name} is not known")
        return _ENDLESS

    def __iter__(self) -> Iterator[Any]:
        return self._batches(start(self._loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        loop = self._trainer.predict_loop
        index = next(number for number, loader in enumerate(loop._combined_loader.flattened) if loader is self)
        last: list[Any] = []
        for number in itertools.count():
            if number >= loop.max_batches[index]:
                return
            batch, error = _next(batches)
            shared = unlike(self._host, batch)
            failed, holders, *differs = self._host.sum([error is not None, len(batch), *shared])
            if failed:
                raise_together(self._host, error, self._name)
            if any(differs):
                raise_unlike(self._host, batch, self._name)
            if not holders:
                return
            if self._compare:
                self.__dict__["_compare"] = False
                warn_of_equal_batches(self._host, batch, self._name)
            if number == 0 and holders < self._host.size:
                # Some rank has nothing to repeat; it takes a batch of the first rank that has one.
                last = self._host.send(batch, self._host.gather(len(batch)).index(1))
            if batch:
                last = containers_copied(batch)  # as the loop may change it
            if batch and not self._host.rank % self._host.cp:
                yield batch[0]
            else:
                _take_part(self._trainer, containers_copied(last)[0], number, index)


def _next(batches: Iterator[Any]) -> tuple[list[Any], Exception | None]:
    try:
        return list(itertools.islice(batches, 1)), None
    except Exception as error:
        return [], error


def _take_part(trainer: L.Trainer, batch: Any, number: int, index: int) -> None:
    """Run `predict_step` as the loop does, without what the loop does around it."""
    loop = trainer.predict_loop
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=index)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=index)
    arguments = loop._build_kwargs(batch, number, index if loop.num_dataloaders > 1 else None)
    trainer.strategy.predict_step(*loop._build_step_args_from_hook_kwargs(arguments, "predict_step"))


def deal_out(loader: object, *, rank: int, num_replicas: int) -> None:
    """Have the sampler that Lightning injected in `predict`, made for one rank, take this rank's part of the samples.

    Made for the rank, Lightning's refuses to have no sample at all.

    Raises:
        ValueError: the loader has a batch sampler that does not keep its sampler.
    """
    assert isinstance(loader, DataLoader)
    batches = loader.batch_sampler
    places = [loader.sampler, *(() if batches is None else vars(batches).values())]
    sampler = next((place for place in places if isinstance(place, UnrepeatedDistributedSampler)), None)
    if sampler is None:
        kind = type(getattr(batches, "_batch_sampler", batches)).__name__
        raise ValueError(
            f"the batch sampler {kind} of the predict_dataloader does not keep the sampler that it is made with, so its"
            " samples cannot be dealt out to ranks; keep it as self.sampler, or set"
            " Trainer(use_distributed_sampler=False) and deal them out yourself"
        )
    order = sampler.dataset._sampler
    if isinstance(order, RandomSampler) and order.generator is None:
        order.generator = torch.Generator().manual_seed(sampler.seed)  # or each rank would have an order of its own
    sampler.rank, sampler.num_replicas = rank, num_replicas
    sampler.num_samples = len(range(rank, sampler.total_size, num_replicas))
