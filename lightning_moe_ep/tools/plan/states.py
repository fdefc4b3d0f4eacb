"""What an optimizer keeps of each parameter, seen by letting it take one step on parameters without data.

A plain model goes in, on the meta device; an `OptimizerStates` comes out, which tells the bytes of state for any part
of a parameter. So any optimizer is known that keeps, for each element, equally many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_ep.fake_tensors import no_data
from lightning_moe_ep.optimizers import check_optimizers, parameter_groups
from lightning_moe_ep.planning.shapes import ParameterShape
from lightning_moe_ep.tools.plan.tracking import Tracker, without_data

STEPS = 1000
"""How many optimizer steps a plan tells a module that a run has: for its schedule, which needs no memory."""


@dataclass(frozen=True)
class State:
    """What is kept of one parameter."""

    per_element: int
    """Bytes for each of its elements."""

    fixed: int
    """Bytes beside them, such as AdamW's count of steps; every rank has these, if it has a part or not."""


@dataclass(frozen=True)
class OptimizerStates:
    """What the optimizers of a run keep."""

    states: Mapping[str, State] = field(default_factory=dict)
    """By the name of the parameter; what has no entry has no state."""

    names: tuple[str, ...] = ()
    """Of the optimizers' classes."""

    whole_model: bool = False
    """Whether a step has intermediate results of all parameters at once (`foreach=True`), or of one after the other."""

    intermediate: float = 0.0
    """Bytes of intermediate results of a step, for each byte of the parameters that it computes at once."""

    assumed: str | None = None
    """Why these are not the run's own, if they are not."""

    def bytes_of(self, parameter: ParameterShape, elements: int) -> int:
        """Of the state of a part of `parameter` with so many elements."""
        state = self.states.get(parameter.name)
        return state.fixed + state.per_element * elements if state is not None else 0


def adamw(model: nn.Module) -> Optimizer:
    """The AdamW of `CausalLMModule`, for a model that says nothing of optimizers."""
    return torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), fused=True)


def observe_states(model: nn.Module, configure: Callable[[nn.Module], Any] | None = None) -> OptimizerStates:
    """Have the optimizers of a model take a step, without data, and see what they keep.

    Args:
        model: as `shapes_of` has left it; its parameters are replaced by some without data. A LightningModule is asked
            for its optimizers.
        configure: makes the optimizers instead, in any form that `configure_optimizers` may return.

    Raises:
        NotImplementedError: an optimizer that does not work on sharded parameters, or one that keeps something that is
            neither of the parameter's size nor of a size that all have.
    """
    with no_data():
        names = {parameter: name for name, parameter in without_data(model).items()}
        optimizers, assumed = _optimizers_of(model, configure)
        states: dict[str, State] = {}
        intermediate, whole_model = 0.0, False
        for optimizer in optimizers:
            ratio, all_at_once = _step(optimizer)
            intermediate, whole_model = max(intermediate, ratio), whole_model or all_at_once
            states.update((names[p], _state(optimizer, p, names[p])) for p in optimizer.state)
    return OptimizerStates(
        states=states,
        names=tuple(type(optimizer).__name__ for optimizer in optimizers),
        whole_model=whole_model,
        intermediate=intermediate,
        assumed=assumed,
    )


def observe_local_states(model: nn.Module, configure: Callable[[nn.Module], Any] | None = None) -> int:
    """The bytes that optimizers keep on this rank of a parallel model, whose parameters become plain and local.

    Args:
        model: on the meta device; useless afterwards.
        configure: as for `observe_states`.
    """
    with no_data():
        without_data(model)
        optimizers, _ = _optimizers_of(model, configure)
        for optimizer in optimizers:
            _step(optimizer)
        kept = [v for each in optimizers for state in each.state.values() for v in state.values()]
        return sum(value.numel() * value.element_size() for value in kept if isinstance(value, Tensor))


def _optimizers_of(
    model: nn.Module, configure: Callable[[nn.Module], Any] | None
) -> tuple[list[Optimizer], str | None]:
    """The optimizers, and why they are not the run's own, if they are not."""
    configured: Any = None
    assumed = None
    if configure is not None:
        configured = configure(model)
    elif isinstance(model, L.LightningModule):
        try:
            configured = _configured(model)
        except Exception as error:  # the user's own code, which may ask for what there is only in a run
            assumed = f"configure_optimizers of {type(model).__name__} cannot be asked without a run: {error}"
    optimizers = list(_optimizers_in(configured)) or [adamw(model)]
    check_optimizers(optimizers)
    return optimizers, assumed


def _configured(module: L.LightningModule) -> Any:
    """What `configure_optimizers` returns, given a Trainer that knows how long it will train and nothing else."""
    before = module._trainer
    module._trainer = SimpleNamespace(
        estimated_stepping_batches=STEPS, max_steps=STEPS, max_epochs=1, accumulate_grad_batches=1
    )
    try:
        return module.configure_optimizers()
    finally:
        module._trainer = before


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for each in configured:
            yield from _optimizers_in(each)


def _step(optimizer: Optimizer) -> tuple[float, bool]:
    """Take a step; returns intermediate bytes by each byte of what is computed at once, and if that is everything."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = False  # torch 2.13: the default where parameters are sharded
    sizes = [p.numel() * p.element_size() for p in trained]
    all_at_once = any(group.get("foreach") for group in optimizer.param_groups)
    tracker = Tracker()
    with tracker:
        optimizer.step()
        more = tracker.highest() - tracker.level
    for parameter in trained:
        parameter.grad = None
    return more / max(1, sum(sizes) if all_at_once else max(sizes, default=1)), all_at_once


def _state(optimizer: Optimizer, parameter: Tensor, name: str) -> State:
    per_element = fixed = 0
    for key, value in optimizer.state[parameter].items():
        if not isinstance(value, Tensor):
            continue
        if value.shape == parameter.shape:
            per_element += value.element_size()
        elif value.numel() == 1:
            fixed += value.element_size()
        else:
            raise NotImplementedError(
                f"{type(optimizer).__name__} keeps {key} {list(value.shape)} of {name} {list(parameter.shape)}: what"
                " ranks keep of it cannot be told from the sizes of their parts"
            )
    return State(per_element=per_element, fixed=fixed)
