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
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_moe_ep.experts import GroupedExperts, find_experts, find_routers
from lightning_moe_ep.tools.verify.cutting import cut, quiet
from lightning_moe_ep.tools.verify.given import Given, Made, prepare
from lightning_moe_ep.tools.verify.measure import Measured, Named, Phase, exact_matrix_products
from lightning_moe_ep.trees import map_tensors

DETACHED = ("routing weights", "router input")
"""Faults of the graph, whose gradients are computed where others do not explain what was measured."""


@dataclass
class Answer:
    """Of one step."""

    losses: list[list[float]] = field(default_factory=list)
    """Of each rank, of its micro-batches, divided by their number."""
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
        strategy=OneProcess(device, world_size=first.layout.world, on_meta=made.strategy.init_on_meta),
    )
    trained.prepare(made)
    with exact_matrix_products():
        trainer.fit(made.module, DataLoader(_Batches(measured), batch_size=None))
    return Single(trained.answers, trained.parts)


class OneProcess(SingleDeviceStrategy):
    """Has one process take the steps of a world: a batch is a list of all ranks' batches."""

    materializes_meta = True
    """The measured weights come in."""

    def __init__(self, device: torch.device, *, world_size: int, on_meta: bool) -> None:
        super().__init__(device)
        self.world_size = world_size
        self.on_meta = on_meta
        self.losses: list[list[Tensor]] = [[] for _ in range(world_size)]
        self.batches: list[tuple[Any, ...]] = []
        """What `training_step` was called with, in this optimizer step."""
        self._repeats = False

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(empty_init):
            if not self.on_meta:
                yield
                return
            with torch.device("meta"):
                yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._repeats:
            self._check_it_repeats(*args)
        self.batches.append(args)
        return self.of_rank(0, *args, **kwargs)

    def _check_it_repeats(self, *args: Any) -> None:
        with torch.no_grad():
            one, other = (float(loss_of(self.of_rank(0, *args))) for _ in range(2))
        if abs(one - other) > 1e-6 * abs(one):
            raise ValueError(
                f"the loss of one batch is {one:.7g} at first and {other:.7g} when it is computed again, with the same"
                " weights: the model, or its loss, draws random numbers in a way that verify cannot take out (it has"
                " set dropout and jitter to 0); take it out by the model's own options"
            )
        self._repeats = True

    def of_rank(self, rank: int, batches: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's `training_step`, with the batch of a rank, and as if on it."""
        self.global_rank = rank
        try:
            return super().training_step(batches[rank], *args, **kwargs)
        finally:
            self.global_rank = 0

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self._backward(0, closure_loss, optimizer)
        for rank in range(1, self.world_size):
            self._backward(rank, self._scaled(self.of_rank(rank, *self.batches[-1])), optimizer)
        return closure_loss

    def again(self, optimizer: Optimizer) -> None:
        """The gradients of the step, anew."""
        optimizer.zero_grad()
        for arguments in self.batches:
            for rank in range(self.world_size):
                super().backward(self._scaled(self.of_rank(rank, *arguments)) / self.world_size, optimizer)

    def _scaled(self, output: Any) -> Tensor:
        assert self.lightning_module is not None
        return loss_of(output) / self.lightning_module.trainer.accumulate_grad_batches

    def _backward(self, rank: int, loss: Tensor, optimizer: Optimizer | None) -> None:
        self.losses[rank].append(loss.detach())
        super().backward(loss / self.world_size, optimizer)


def loss_of(output: Any) -> Tensor:
    """Out of what a `training_step` returned."""
    return output["loss"] if isinstance(output, Mapping) else output


class _Batches(IterableDataset):  # type: ignore[type-arg]
    """The micro-batches of the steps, each a list of all ranks'; as long as the run's own loader."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def __len__(self) -> int:
        number = self._measured.phases[0].num_batches
        return int(number) if number != float("inf") else 2**31

    def __iter__(self) -> Iterator[Any]:
        for phase in self._measured.phases:
            yield from (list(of_ranks) for of_ranks in zip(*phase.step.batches, strict=True))


class _Answering(L.Callback):
    """Puts in what was measured, takes out what is right."""

    def __init__(self, given: Given, measured: Measured, explained: Callable[[Named, Phase], bool]) -> None:
        self.given = given
        self.measured = measured
        self.explained = explained
        self.answers: list[Answer] = []
        self.parts: dict[str, str] = {}
        self._module: L.LightningModule

    def edit(self, module: L.LightningModule) -> None:
        """What is done to the plain model; the weights on the meta device give way to those that were measured."""
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
        module.transfer_batch_to_device = lambda batch, device, dataloader_idx: map_tensors(
            lambda tensor: tensor.to(device), batch
        )
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
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        if strategy.batches:
            return
        step = self._phase.step
        if self.answers:
            with torch.no_grad():
                for name, parameter in pl_module.named_parameters():
                    parameter.copy_(step.before[name])
            self._restore(trainer.optimizers[0], step.state_before)

    def _clip(self, optimizer: Optimizer, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        """In the moment between backward and step: take the gradients out, put the measured ones in."""
        module, phase = self._module, self._phase
        strategy: Any = module.trainer.strategy
        found = Answer(losses=[[float(loss) for loss in of_rank] for of_rank in strategy.losses])
        found.gradients = _gradients(module)
        if not self.explained(found.gradients, phase):
            for what in DETACHED:
                with _not_logging(module), detached(module, what):
                    strategy.again(getattr(optimizer, "optimizer", optimizer))
                found.detached[what] = _gradients(module)
        for name, parameter in module.named_parameters():
            clipped = phase.step.clipped.get(name)  # an optimizer leaves those that have none alone
            parameter.grad = None if clipped is None else clipped.to(parameter.device, copy=True)
        self._found = found

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy: Any = trainer.strategy
        if len(strategy.batches) < trainer.accumulate_grad_batches:
            return
        found = self._found
        found.after = {name: p.detach().cpu().clone() for name, p in pl_module.named_parameters()}
        names = {id(p): name for name, p in pl_module.named_parameters()}
        for parameter, state in trainer.optimizers[0].state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
                    found.state_after.setdefault(key, {})[names[id(parameter)]] = value.cpu().clone()
        self.answers.append(found)
        strategy.batches.clear()
        strategy.losses = [[] for _ in strategy.losses]
        trainer.should_stop = len(self.answers) == len(self.measured.phases)

    def _restore(self, optimizer: Optimizer, state: Mapping[str, Named]) -> None:
        """The optimizer's state as it was before the step; where that had been lost, it stays as it is here."""
        names = {id(p): name for name, p in self._module.named_parameters()}
        for parameter, of_parameter in optimizer.state.items():
            for key, value in of_parameter.items():
                name = names[id(parameter)]
                if isinstance(value, Tensor) and name in state.get(key, {}):
                    value.copy_(state[key][name])


def parts_of(module: nn.Module) -> dict[str, str]:
    """Of which part of a plain model each trained parameter is: expert, shared expert, router, adapter or dense."""
    experts = find_experts(module)
    try:
        routers = set(find_routers(module).values())
    except ValueError:
        routers = set()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parts = dict.fromkeys((name for name, p in module.named_parameters() if p.requires_grad), "dense")

    def mark(parameters: Any, part: str) -> None:
        parts.update({names[id(p)]: part for p in parameters if names[id(p)] in parts})

    for found in experts:
        outer = module.get_submodule(found.name.rpartition(".")[0])
        for name, inner in outer.named_modules():
            if "shared" in name.split(".")[-1] and found.module not in inner.modules():
                mark(inner.parameters(), "shared expert")
    for router in routers:
        mark(router.parameters(), "router")
    for found in experts:
        inside = dict(found.module.named_parameters())
        stacked = set(found.adapter.parameters) & set(inside)
        mark((inside[name] for name in stacked or inside), "expert")
    for name, part in parts.items():
        if "lora_" in name:
            parts[name] = "expert adapter" if part == "expert" else "adapter"
    return parts


@contextmanager
def detached(module: nn.Module, what: str) -> Iterator[None]:
    """Inside, the experts' third argument, or what routers are given, is out of the graph."""

    def cut_graph(index: int | None) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(
                arg.detach() if isinstance(arg, Tensor) and index in (None, number) else arg
                for number, arg in enumerate(args)
            )

        return hook

    if what == "router input":
        hooks = [router.register_forward_pre_hook(cut_graph(None)) for router in set(_routers(module))]
    else:
        hooks = [found.module.register_forward_pre_hook(cut_graph(2)) for found in find_experts(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _routers(module: nn.Module) -> list[nn.Module]:
    try:
        return list(find_routers(module).values())
    except ValueError:
        return []


def one_by_one(self: GroupedExperts, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The definition: each token's weighted sum of its experts' outputs, one expert after the other."""
    output = torch.zeros_like(hidden)
    for expert in range(self.num_experts):
        token, slot = (top_k_index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, self.down_proj[expert])
        output = output.index_add(0, token, result * top_k_weights[token, slot].unsqueeze(1))
    return output


def _gradients(module: nn.Module) -> Named:
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().clone()
        for name, p in module.named_parameters()
        if p.requires_grad
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
                    places[key] = made[id(tensor)]  # type: ignore[assignment]


@contextmanager
def _not_logging(module: Any) -> Iterator[None]:
    """Lightning refuses what is logged out of turn."""
    module.log = module.log_dict = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.log, module.log_dict
