"""Counts what a rank hands to collectives in an optimizer step of a real run, by when and by which collective."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.dispatch import AllToAllDispatcher, ExpertGroup
from lightning_moe_ep.planning.exchange import Message, Rows
from lightning_moe_ep.rows import is_recomputation
from tests.parity import Case, CaseModule, trainer
from tests.tools.plan.runs import loss_of_slice

Sent = dict[tuple[str, str], float]
"""Bytes by phase and collective."""


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sent(arguments: dict[str, Any]) -> int:
    rows, send, group = arguments["input"], arguments.get("input_split_sizes"), arguments.get("group")
    size, me = dist.get_world_size(group), dist.get_rank(group)
    per_row = _bytes(rows) // max(1, rows.shape[0])
    return sum(n for r, n in enumerate(send or [rows.shape[0] // size] * size) if r != me) * per_row


_COLLECTIVES = {
    "all_gather_single": lambda a, size: (size - 1) * _bytes(a["input_tensor"]),
    "reduce_scatter_single": lambda a, size: (size - 1) * _bytes(a["input"]) // size,
    "all_reduce": lambda a, size: 2 * (size - 1) * _bytes(a["tensor"]) // size,
    "all_to_all_single": lambda a, size: _sent(a),
}


class CountSent(L.Callback):
    """Of the last optimizer step: bytes sent, what went over the host apart, and what was routed."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()
        self.host_calls = 0
        self.routed: list[list[Any]] = []
        self._phase = "step"
        self._patches = ExitStack()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        meshes = trainer.strategy.meshes
        host = {id(group) for group in (meshes.host_group, meshes.host_ep_group, meshes.host_cp_group)}

        def counting(name: str, original: Any) -> Any:
            signature = inspect.signature(original)

            def call(*args: Any, **kwargs: Any) -> Any:
                arguments = signature.bind(*args, **kwargs).arguments
                group = arguments.get("group")
                if id(group) in host:
                    self.host_calls += 1
                elif dist.get_world_size(group) > 1:
                    self.sent[self._phase, name] += _COLLECTIVES[name](arguments, dist.get_world_size(group))
                return original(*args, **kwargs)

            return call

        for name in _COLLECTIVES:
            self._patches.enter_context(patch.object(dist, name, counting(name, getattr(dist, name))))

        def routing(original: Any) -> Any:
            def call(dispatcher: AllToAllDispatcher, hidden: Tensor, index: Tensor, *args: Any, **options: Any) -> Any:
                if not is_recomputation():
                    self.routed.append(rows_of(index, dispatcher.expert_group))
                return original(dispatcher, hidden, index, *args, **options)

            return call

        self._patches.enter_context(patch.object(AllToAllDispatcher, "__call__", routing(AllToAllDispatcher.__call__)))

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self.sent.clear()
            self.host_calls = 0
            self.routed.clear()
        self._phase = "forward"

    def on_before_backward(self, *_: Any) -> None:
        self._phase = "backward"

    def on_after_backward(self, *_: Any) -> None:
        self._phase = "step"

    def on_train_end(self, *_: Any) -> None:
        self._patches.close()


class SlicedModule(CaseModule):
    """Slices of sequences, of which the ranks of a cp group are given the same."""

    def train_dataloader(self) -> Any:
        groups = self.trainer.strategy.cp
        batches = [batch for step in self.case.batches() for batch in step[dist.get_rank() // groups]]
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        meshes, ids = self.trainer.strategy.meshes, batch["input_ids"]
        batch = {"input_ids": ids, "labels": ids}
        return loss_of_slice(self.model, batch, meshes.layout.cp, meshes.cp_rank)


def rows_of(index: Tensor, group: ExpertGroup) -> Any:
    """`[rank]` pairs and rows that these choices send to each rank of the group."""
    owners = index // group.num_local
    pairs = [int((owners == rank).sum()) for rank in range(group.size)]
    rows = [int((owners == rank).any(dim=1).sum()) for rank in range(group.size)]
    return pairs, rows


def counted(case: Case, modules: type[CaseModule] = CaseModule) -> tuple[Sent, int, list[Any]]:
    """On a rank: what the last optimizer step of the case's run sent, how often the host did, what was routed."""
    count = CountSent()
    trainer(
        MoEEPStrategy(ep=case.ep, replicate=case.replicate, **case.strategy),
        max_epochs=1,
        accumulate_grad_batches=len(case.tokens[0]),
        gradient_clip_val=case.clip,
        precision=case.precision,
        callbacks=[count],
    ).fit(modules(case))
    return {key: nbytes for key, nbytes in count.sent.items() if nbytes}, count.host_calls, count.routed


def predicted(messages: Iterable[Message]) -> Sent:
    """A plan's messages, by phase and collective."""
    sent: Counter[tuple[str, str]] = Counter()
    for message in messages:
        name = message.collective if message.collective == "all_reduce" else f"{message.collective}_single"
        sent[message.phase, name] += message.nbytes
    return dict(sent)


def rows_between(routed: list[Any], rank: int, ep: int) -> list[Rows]:
    """What a rank sent and received in each forward, from what each rank of the world routed."""
    me, first = rank % ep, rank - rank % ep
    found = []
    for number in range(len(routed[rank])):
        of_group = [routed[first + other][number] for other in range(ep)]
        (pairs_to, rows_to) = of_group[me]
        found.append(
            Rows(
                sent=sum(rows_to) - rows_to[me],
                received=sum(rows[me] for other, (_, rows) in enumerate(of_group) if other != me),
                pairs_sent=sum(pairs_to) - pairs_to[me],
                pairs_received=sum(pairs[me] for other, (pairs, _) in enumerate(of_group) if other != me),
            )
        )
    return found
