"""Right gradients at the optimizer boundary: experts scaled, replicated parameters averaged, the norm exact.

FSDP2 averages an expert's gradient over efsdp, and its owner has already summed the tokens of the whole ep group; the
mean over all ranks, which DDP's users mean, is therefore 1/ep of it.
"""

from __future__ import annotations

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe_ep.experts import ep_size, expert_parameters, lone_expert_parameters
from lightning_moe_ep.gradients import (
    GradientNorm,
    average_gradients,
    clip_by_norm,
    gradient_norm,
    is_replicated,
    scale_gradients,
)


class ExpertGradientCallback(L.Callback):
    """Makes gradients those of plain data parallelism, and clips them across meshes.

    `MoEEPStrategy` adds one if the user gave none; give one explicitly to set its options. It stands first among the
    callbacks, so that no other sees a gradient that is not final.

    With norm clipping on, the norm before clipping is logged as `grad_norm`, with `grad_norm/dense` and
    `grad_norm/experts` beside it; without, it is computed for the log. No host sync is added.
    """

    def __init__(self, *, norm_type: float = 2.0, error_if_nonfinite: bool = False, log_grad_norm: bool = True) -> None:
        """
        Args:
            norm_type: the p of the norm that is logged and that `gradient_clip_algorithm="norm"` uses; may be inf.
            error_if_nonfinite: raise, on every rank, when the norm is NaN or infinite. Asks the device every step.
            log_grad_norm: log the norm.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type} must be positive, or inf")
        self.norm_type = norm_type
        self.error_if_nonfinite = error_if_nonfinite
        self.log_grad_norm = log_grad_norm
        self.reduces = True
        """Whether the coming backward reduces gradients; the strategy clears it while gradients accumulate."""
        self._trainer: L.Trainer | None = None
        self._expert_parameters: list[nn.Parameter] = []
        self._lone_parameters: list[nn.Parameter] = []
        self._replicated_parameters: list[nn.Parameter] = []
        self._ep = 1
        self._logged: set[int] = set()

    def put_first(self, trainer: L.Trainer) -> ExpertGradientCallback:
        """Make the one that the user gave, else this one, the first of a Trainer's callbacks; returns it.

        Raises:
            ValueError: the user gave more than one.
        """
        given = [callback for callback in trainer.callbacks if isinstance(callback, ExpertGradientCallback)]
        if len(given) > 1:
            raise ValueError("the Trainer has more than one ExpertGradientCallback; gradients would be scaled twice")
        first = given[0] if given else self
        trainer.callbacks[:] = [first, *(callback for callback in trainer.callbacks if callback is not first)]
        return first

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._trainer = trainer
        self._ep = ep_size(pl_module)
        self._expert_parameters = expert_parameters(pl_module)
        self._lone_parameters = lone_expert_parameters(pl_module)
        self._replicated_parameters = [p for p in pl_module.parameters() if is_replicated(p)]
        self._logged = set()

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._ep > 1:
            # What earlier backwards left is scaled already, and will be once more after this one.
            scale_gradients(self._written_by_backward(), float(self._ep))

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._ep > 1:
            scale_gradients(self._written_by_backward(), 1.0 / self._ep)
        if self.reduces:
            # Asked anew each time: a parameter may be frozen or released in the course of a fit.
            trained = [parameter for parameter in self._replicated_parameters if parameter.requires_grad]
            average_gradients(trained, dist.group.WORLD)

    def _written_by_backward(self) -> list[nn.Parameter]:
        """The expert parameters whose gradients this backward adds to."""
        return self._expert_parameters if self.reduces else self._lone_parameters

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        clips_later = (
            pl_module.automatic_optimization
            and trainer.gradient_clip_val
            and trainer.gradient_clip_algorithm != "value"
        )
        logged = _first_parameter(optimizer) in self._logged
        if (self.log_grad_norm or self.error_if_nonfinite) and not clips_later and not logged:
            self._norm(optimizer)
        self._logged.discard(_first_parameter(optimizer))

    def clip(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scale the gradients of `optimizer`, across meshes, to a norm of at most `max_norm`.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set; on every rank.
        """
        norm = self._norm(optimizer)
        clip_by_norm(_parameters(optimizer), total=norm.total, max_norm=max_norm)

    def _norm(self, optimizer: Optimizer) -> GradientNorm:
        assert self._trainer is not None
        experts = {id(parameter) for parameter in self._expert_parameters}
        parts: dict[str, list[nn.Parameter]] = {"dense": [], "experts": []}
        for parameter in _parameters(optimizer):
            parts["experts" if id(parameter) in experts else "dense"].append(parameter)
        norm = gradient_norm(
            parts, norm_type=self.norm_type, group=dist.group.WORLD, device=self._trainer.strategy.root_device
        )
        if self.error_if_nonfinite and not torch.isfinite(norm.total):
            values = ", ".join(f"{name} {float(value)}" for name, value in norm.parts.items())
            raise RuntimeError(
                f"the gradient norm is {float(norm.total)} at step {self._trainer.global_step} ({values}); set"
                " error_if_nonfinite=False on ExpertGradientCallback to go on"
            )
        if self.log_grad_norm:
            module = self._trainer.lightning_module
            module.log("grad_norm", norm.total)
            module.log_dict({f"grad_norm/{name}": value for name, value in norm.parts.items()})
            # In manual optimization the clip comes before the hook that would log it again, clipped.
            if not module.automatic_optimization:
                self._logged.add(_first_parameter(optimizer))
        return norm


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _first_parameter(optimizer: Optimizer) -> int:
    """Tells optimizers apart, also when Lightning has wrapped one."""
    return id(optimizer.param_groups[0]["params"][0])
