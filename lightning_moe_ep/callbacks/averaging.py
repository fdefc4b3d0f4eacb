"""Averages of the weights of a sharded model: exponential (EMA), or of equal weight (SWA).

Each rank averages the shards that it holds, on its device, by the formulas of `torch.optim.swa_utils`; nothing is sent.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_moe_ep.experts import choice_biases
from lightning_moe_ep.fsdp import reshard
from lightning_moe_ep.gradients import local_tensor
from lightning_moe_ep.shards import of_part


class ShardedWeightAveraging(L.Callback):
    """Averages the weights in the course of a training; in place of Lightning's `WeightAveraging`, which cannot.

    Validation has the averaged weights, and so has the model when the fit has ended, for tests and exports; a further
    fit goes on from the trained ones. A checkpoint has the averages as its `state_dict`, which is what validation saw
    and what all but a training read, and the trained weights beside them; a training resumes with both, at any layout.

    What is averaged: parameters that are trained, floating buffers that are saved, and the biases that routers choose
    by; the rest is as it is in the model. Averages of bf16 weights are in fp32, as bf16 would round the updates away.
    It takes the memory of one more copy of these shards, and of a second one in validation.
    """

    def __init__(
        self, decay: float | None = 0.999, update_every_n_steps: int = 1, update_starting_at_step: int = 0
    ) -> None:
        """
        Args:
            decay: how much of an average stays in an update, in [0, 1]; None: all updates count equally (SWA).
            update_every_n_steps: update after each such number of optimizer steps.
            update_starting_at_step: the first step, from 0, after which to update. Before it there is no average, and
                validation has the weights as they are.

        Raises:
            ValueError: one of them is out of range.
        """
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} must be from 0 to 1, such as 0.999, or None for an equal average")
        if update_every_n_steps < 1 or update_starting_at_step < 0:
            raise ValueError(
                f"update_every_n_steps={update_every_n_steps} must be at least 1, and"
                f" update_starting_at_step={update_starting_at_step} at least 0"
            )
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.num_averaged = 0
        self._latest_step = 0
        self._module: L.LightningModule | None = None
        self._tensors: dict[str, Tensor] = {}
        """What may be averaged, sharded, by its name in the state dict."""
        self._names: dict[str, str] = {}
        """All names in the state dict of what may be averaged: tied weights have several."""
        self._moving: set[str] = set()
        """Which of them may change without being trained: buffers, and biases that routers choose by."""
        self._averages: dict[str, Tensor] = {}
        """This rank's shards."""
        self._trained: dict[str, Tensor] = {}
        """The shards that are trained, while the model has the averages."""

    def should_update(self, step: int) -> bool:
        """Whether to update after this step, counted from 0; for a schedule of one's own."""
        return step >= self.update_starting_at_step and step % self.update_every_n_steps == 0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find what to average.

        Raises:
            ValueError: another strategy than MoEEPStrategy, which would save no averages.
        """
        if not getattr(trainer.strategy, "saves_averages", False):
            raise ValueError(
                f"ShardedWeightAveraging is for MoEEPStrategy, not for {type(trainer.strategy).__name__}, whose"
                " checkpoints would not have the averages; use Lightning's WeightAveraging there"
            )
        if self._module is not pl_module:
            self.forget()
            self._module = pl_module
        self._find_tensors(pl_module)
        self._show_trained()

    def _find_tensors(self, module: nn.Module) -> None:
        reshard(module)
        state = module.state_dict(keep_vars=True)
        names: dict[int, str] = {}
        self._names = {
            name: names.setdefault(id(value), name)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        self._tensors = {name: state[name] for name in names.values()}
        biases = {id(bias.tensor) for bias in choice_biases(module)}
        self._moving = {name for name, t in self._tensors.items() if not isinstance(t, nn.Parameter) or id(t) in biases}

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self._latest_step and self.should_update(trainer.global_step - 1):
            self._update()
            self._latest_step = trainer.global_step

    @torch.no_grad()
    def _update(self) -> None:
        assert self._module is not None
        weight = 1 / (self.num_averaged + 1) if self.decay is None else 1 - self.decay
        reshard(self._module)
        averages, current = [], []
        for name, tensor in self._averaged_tensors().items():
            local = local_tensor(tensor)
            if name not in self._averages:  # the first update, or it is trained since
                self._averages[name] = _like(local).copy_(local)
            elif self._averages[name].dtype == local.dtype:
                averages.append(self._averages[name])
                current.append(local)
            else:
                self._averages[name].lerp_(local.to(self._averages[name].dtype), weight)
        if averages:
            torch._foreach_lerp_(averages, current, weight)
        self.num_averaged += 1

    def _averaged_tensors(self) -> dict[str, Tensor]:
        # Asked anew each time: a parameter may be frozen or released in the course of a fit.
        return {
            name: tensor
            for name, tensor in self._tensors.items()
            if tensor.requires_grad or name in self._moving or name in self._averages
        }

    # Which weights the model has.

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._module is pl_module:
            self._show_averages()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._show_trained()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show_averages()

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show_averages()  # also when no step was left to train

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._show_trained()

    @torch.no_grad()
    def _show_averages(self) -> None:
        if not self._averages or self._trained:
            return
        assert self._module is not None
        reshard(self._module)
        for name, average in self._averages.items():
            local = local_tensor(self._tensors[name])
            self._trained[name] = local.clone()
            local.copy_(average)

    @torch.no_grad()
    def _show_trained(self) -> None:
        if not self._trained:
            return
        assert self._module is not None
        reshard(self._module)  # an evaluation leaves the roots' weights gathered
        for name, trained in self._trained.items():
            local_tensor(self._tensors[name]).copy_(trained)
        self._trained = {}

    # Checkpoints. The strategy asks, as shards can be saved and loaded by it alone.

    def averages(self) -> dict[str, Tensor]:
        """The averages, sharded as the weights are, by their names in the state dict; `{}` before the first update."""
        return self._sharded(self._averages)

    def trained(self) -> dict[str, Tensor]:
        """The weights that are trained, where the model has others."""
        return self._sharded(self._trained)

    def _sharded(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        sharded = {}
        for name, first in self._names.items():
            if first in shards:
                shard, like = shards[first], self._tensors[first]
                sharded[name] = of_part(shard, like) if isinstance(like, DTensor) else shard
        return sharded

    def make(self) -> dict[str, Tensor]:
        """Averages to be filled from a checkpoint, sharded."""
        self._averages = {name: _like(local_tensor(tensor)) for name, tensor in self._averaged_tensors().items()}
        return self.averages()

    def forget(self) -> None:
        """Begin anew, from the weights as they are in the model."""
        self.num_averaged = self._latest_step = 0
        self._averages, self._trained = {}, {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_averaged": self.num_averaged, "latest_step": self._latest_step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_averaged, self._latest_step = state_dict["num_averaged"], state_dict["latest_step"]


def averaging_of(trainer: L.Trainer) -> ShardedWeightAveraging | None:
    """The Trainer's, if it has one.

    Raises:
        ValueError: it has two.
        NotImplementedError: it has one that copies the model, as Lightning's do.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise NotImplementedError(
                f"the callback {type(callback).__name__} copies the whole model, which a sharded one does not allow;"
                " use lightning_moe_ep.ShardedWeightAveraging(decay=0.999), or decay=None for an equal average (SWA)"
            )
    found = [callback for callback in trainer.callbacks if isinstance(callback, ShardedWeightAveraging)]
    if len(found) > 1:
        raise ValueError("the Trainer has more than one ShardedWeightAveraging; validation can have one of them only")
    return found[0] if found else None


def _like(shard: Tensor) -> Tensor:
    """Room for the average of a shard."""
    return torch.empty_like(shard, dtype=torch.promote_types(shard.dtype, torch.float32))
