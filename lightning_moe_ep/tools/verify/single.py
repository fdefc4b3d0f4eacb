"""What is right: one process, fp32, the whole model, the batches of all ranks.

The plain module is trained by a plain Trainer on one device; nothing that spreads experts or shards takes part. The
model starts from the weights that were measured, and the optimizer steps with the gradients that were measured: what
the gradients should have been, and what the step should have made of them, are compared apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_moe_ep.checkpoint import leave_unread
from lightning_moe_ep.experts import GroupedExperts
from lightning_moe_ep.tools.verify.cutting import cut, quiet
from lightning_moe_ep.tools.verify.given import Given, Made, prepare
from lightning_moe_ep.tools.verify.measure import exact_matrix_products
from lightning_moe_ep.tools.verify.one_process import OneProcess
from lightning_moe_ep.tools.verify.parts import DETACHED, detached, parts_of, record_choices
from lightning_moe_ep.tools.verify.seen import Measured, Named, Phase


@dataclass
class Answer:
    """Of one step."""

    losses: list[list[float]] = field(default_factory=list)
    """Of each rank, of its micro-batches, divided by their number."""
    chosen: list[list[Tensor]] = field(default_factory=list)
    """Of each rank, the expert ids that routers gave."""
    gradients: Named = field(default_factory=dict)
    detached: dict[str, Named] = field(default_factory=dict)
    """The gradients if something were detached, by `DETACHED`."""
    after: Named = field(default_factory=dict)
    state_after: dict[str, Named] = field(default_factory=dict)


@dataclass
class Single:
    """What the single process says."""

    answers: list[Answer]
    parts: dict[str, str]
    """Of which part of the model each trained parameter is."""


def answer(
    given: Given, measured: Measured, *, device: torch.device, explained: Callable[[Named, Phase], bool]
) -> Single:
    """Compute what the measured steps should have been.

    Args:
        given: makes the module.
        measured: where the steps start, and their batches.
        device: where to.
        explained: whether right gradients explain what was measured, up to factors; else those with something
            detached are computed.

    Raises:
        ValueError: the module's loss is another each time that it is asked.
    """
    made = given.make()
    trained = _Answering(given, measured, explained)
    prepare(made, trained.edit)
    first = measured.phases[0]
    trainer = L.Trainer(
        **{
            **made.options,
            "accelerator": "cuda" if device.type == "cuda" else "cpu",
            "devices": [device.index or 0] if device.type == "cuda" else 1,
            "num_nodes": 1,
            "plugins": None,
            "callbacks": [trained],
            "gradient_clip_val": None,
            "gradient_clip_algorithm": None,
            "use_distributed_sampler": False,
            "overfit_batches": 0,
            "limit_train_batches": None,
        },
        strategy=OneProcess(device, world_size=first.layout.data_parallel, on_meta=made.strategy.init_on_meta),
    )
    trained.prepare(made)
    with exact_matrix_products():
        trainer.fit(made.module, DataLoader(_Batches(measured, trained.answers), batch_size=None))
    measured_parts = {name: part for name, part in trained.parts.items() if name in first.step.gradients}
    return Single(trained.answers, measured_parts)


class _Batches(IterableDataset):
    """The micro-batches of the steps, each a list of all ranks'; as long as the run's own loader."""

    def __init__(self, measured: Measured, answers: list[Answer]) -> None:
        self._measured = measured
        self._answers = answers

    def __len__(self) -> int:
        number = self._measured.phases[0].num_batches
        return int(number) if number != float("inf") else 2**31

    def __iter__(self) -> Iterator[Any]:
        for phase in self._measured.phases[len(self._answers) :]:  # an epoch may have been shorter than that
            yield from (list(of_ranks) for of_ranks in zip(*phase.step.batches, strict=True))


class _Answering(L.Callback):
    """Puts in what was measured, takes out what is right."""

    def __init__(self, given: Given, measured: Measured, explained: Callable[[Named, Phase], bool]) -> None:
        self.given = given
        self.measured = measured
        self.explained = explained
        self.answers: list[Answer] = []
        self.parts: dict[str, str] = {}
        self._found: Answer | None = None
        """Of the step that is under way."""
        self._module: L.LightningModule

    def edit(self, module: L.LightningModule) -> None:
        """What is done to the plain model; the weights on the meta device give way to those that were measured."""
        leave_unread(module)
        cut(module, self.given.layers)
        quiet(module)
        self.parts = parts_of(module)
        step = self.measured.phases[0].step
        _fill(module, {**step.before, **step.buffers})
        for part in module.modules():
            if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
                part.set_experts_implementation("eager")
            if isinstance(part, GroupedExperts):
                part.forward = MethodType(one_by_one, part)  # type: ignore[method-assign]

    def prepare(self, made: Made) -> None:
        """Have the module take batches as ranks had them, and gradients as they were clipped."""
        module: Any = made.module
        self._module = module
        module.on_before_batch_transfer = lambda batch, dataloader_idx: batch
        module.on_after_batch_transfer = lambda batch, dataloader_idx: self._as_marked(batch)
        transfer = module.transfer_batch_to_device
        module.transfer_batch_to_device = lambda batch, *where: [transfer(of_rank, *where) for of_rank in batch]
        module.configure_gradient_clipping = self._clip

    def _as_marked(self, batches: list[Any]) -> list[Any]:
        """Modules that count tokens are told their number in the window, which is counted here once more."""
        module: Any = self._module
        if getattr(module, "count_tokens", None) is None:
            return batches
        marks = ("num_items_in_batch", "num_micro_batches")
        of_ranks = self.measured.phases[len(self.answers)].step.batches
        unmarked = [{k: v for k, v in b.items() if k not in marks} for b in itertools.chain(*of_ranks)]
        items = sum(int(module.count_tokens(batch)) for batch in unmarked)
        return [{**b, marks[0]: items, marks[1]: len(of_ranks[0])} for b in batches]

    @property
    def _phase(self) -> Phase:
        return self.measured.phases[len(self.answers)]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        record_choices(pl_module, strategy.chosen)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if strategy.batches:
            return
        step = self._phase.step
        if self.answers:
            with torch.no_grad():
                for name, tensor in itertools.chain(pl_module.named_parameters(), pl_module.named_buffers()):
                    tensor.copy_({**step.before, **step.buffers}[name])
            self._restore(trainer.optimizers[0], step.state_before)

    def _clip(self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        """In the moment between backward and step: take the gradients out, put the measured ones in."""
        module, phase = self._module, self._phase
        strategy: Any = module.trainer.strategy
        found = Answer(losses=[[float(loss) for loss in of_rank] for of_rank in strategy.losses])
        found.chosen = [list(of_rank) for of_rank in strategy.chosen_by_rank]
        found.gradients = _gradients(module, phase)
        if not self.explained(found.gradients, phase):
            for what in DETACHED:
                with _not_logging(module), detached(module, what):
                    strategy.again(getattr(optimizer, "optimizer", optimizer))
                found.detached[what] = _gradients(module, phase)
        for name, parameter in module.named_parameters():
            clipped = phase.step.clipped.get(name)  # an optimizer leaves those that have none alone
            parameter.grad = None if clipped is None else clipped.to(parameter.device, copy=True)
        self._found = found

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if self._found is None:  # within an accumulation window
            return
        found, self._found = self._found, None
        found.after = {name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()}
        names = {id(p): name for name, p in pl_module.named_parameters()}
        for parameter, state in trainer.optimizers[0].state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
                    found.state_after.setdefault(key, {})[names[id(parameter)]] = value.cpu().clone()
        self.answers.append(found)
        pl_module.zero_grad()  # of those too that no optimizer has
        strategy.batches.clear()
        strategy.losses = [[] for _ in strategy.losses]
        strategy.chosen_by_rank = [[] for _ in strategy.chosen_by_rank]
        trainer.should_stop = len(self.answers) == len(self.measured.phases)

    def _restore(self, optimizer: Optimizer, state: Mapping[str, Named]) -> None:
        """The optimizer's state as it was before the step; where that had been lost, it stays as it is here."""
        names = {id(p): name for name, p in self._module.named_parameters()}
        for parameter, of_parameter in optimizer.state.items():
            for key, value in of_parameter.items():
                name = names[id(parameter)]
                if isinstance(value, Tensor) and name in state.get(key, {}):
                    value.copy_(state[key][name])


def one_by_one(self: GroupedExperts, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The definition: each token's weighted sum of its experts' outputs, one expert after the other."""
    output = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        token, slot = (top_k_index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, self.down_proj[expert])
        output = output.index_add(0, token, result * top_k_weights[token, slot].unsqueeze(1))
    return output


def _gradients(module: nn.Module, phase: Phase) -> Named:
    """Of the parameters of which gradients were measured."""
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().clone()
        for name, p in module.named_parameters()
        if name in phase.step.gradients
    }


def _fill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values in the places of parameters and buffers, which may be on the meta device."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if lacking := sorted(tensors.keys() - values.keys()):
        raise RuntimeError(f"the plain model has {lacking[0]}, which the parallel one has not")
    made: dict[int, Tensor] = {}
    for name, old in tensors.items():
        value = values[name].clone()
        new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
        made[id(old)] = new
    for part in module.modules():
        for places in (part._parameters, part._buffers):
            for key, tensor in places.items():
                if tensor is not None:
                    places[key] = made[id(tensor)]


@contextmanager
def _not_logging(module: Any) -> Iterator[None]:
    """Lightning refuses what is logged out of turn."""
    module.log = module.log_dict = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.log, module.log_dict
