"""Right gradients at the optimizer boundary: experts scaled, replicated parameters averaged, the norm exact.

FSDP2 averages an expert's gradient over efsdp, and its owner has already summed the tokens of the whole ep group; the
mean over all ranks, which DDP's users mean, is therefore 1/ep of it.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
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
    nonfinite_gradients,
    scale_gradients,
)

Nonfinite = Literal["keep", "skip", "raise"]
"""What becomes of a step whose gradients are not finite."""

SKIPPED_STEPS = "skipped_steps"
"""As which their number is logged, and kept in checkpoints."""

SHOWN = 3
"""Names in an error."""


class ExpertGradientCallback(L.Callback):
    """Makes gradients those of plain data parallelism, and clips them across meshes.

    `MoEEPStrategy` adds one if the user gave none; give one explicitly to set its options. It stands first among the
    callbacks, so that no other sees a gradient that is not final.

    With norm clipping on, the norm before clipping is logged as `grad_norm`, with `grad_norm/dense` and
    `grad_norm/experts` beside it; without, it is computed for the log. With nonfinite="skip", `skipped_steps` is
    logged, how many there were since the beginning of the training; checkpoints have it. "skip" and "raise" wait for
    the device at each optimizer step, "keep" never does.
    """

    def __init__(self, *, norm_type: float = 2.0, nonfinite: Nonfinite = "keep", log_grad_norm: bool = True) -> None:
        """
        Args:
            norm_type: the p of the norm that is logged and that `gradient_clip_algorithm="norm"` uses; may be inf.
            nonfinite: what to do when the gradients of an optimizer have a NaN or an infinity on any rank. "keep": step
                with them. "skip": leave its weights and its state as they are; as with a gradient scaler, learning rate
                schedulers and `global_step` count the step. "raise": an error, which names parameters. In each case
                all ranks do the same.
            log_grad_norm: log the norm.

        Raises:
            ValueError: norm_type is not positive, or nonfinite is none of these.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type} must be positive, or inf")
        if nonfinite not in get_args(Nonfinite):
            raise ValueError(f"nonfinite={nonfinite!r} is not known; use one of {list(get_args(Nonfinite))}")
        self.norm_type = norm_type
        self.nonfinite = nonfinite
        self.log_grad_norm = log_grad_norm
        self.reduces = True
        """Whether the coming backward reduces gradients; the strategy clears it while gradients accumulate."""
        self.skipped_steps = 0
        self._trainer: L.Trainer | None = None
        self._expert_parameters: list[nn.Parameter] = []
        self._lone_parameters: list[nn.Parameter] = []
        self._replicated_parameters: list[nn.Parameter] = []
        self._ep = 1
        self._norms: dict[int, GradientNorm] = {}
        """Of the optimizers whose step is to come, by their first parameter."""

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
        """See which parameters there are.

        Raises:
            ValueError: nonfinite="skip" with another strategy than MoEEPStrategy.
        """
        if self.nonfinite == "skip" and getattr(trainer.precision_plugin, "gradients", None) is not self:
            raise ValueError(
                f"ExpertGradientCallback(nonfinite='skip') is for MoEEPStrategy: {type(trainer.strategy).__name__}"
                " would step all the same; use 'keep' or 'raise'"
            )
        self._trainer = trainer
        self._ep = ep_size(pl_module)
        self._expert_parameters = expert_parameters(pl_module)
        self._lone_parameters = lone_expert_parameters(pl_module)
        self._replicated_parameters = [p for p in pl_module.parameters() if is_replicated(p)]
        self._norms = {}

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
        # A user's own clipping may do without the norm, or spoil the gradients before it takes it.
        clips_later = (
            pl_module.automatic_optimization
            and (trainer.gradient_clip_val or 0) > 0
            and trainer.gradient_clip_algorithm != "value"
            and not is_overridden("configure_gradient_clipping", pl_module)
        )
        wanted = self.log_grad_norm or self.nonfinite != "keep"
        if wanted and not clips_later and _first_parameter(optimizer) not in self._norms:
            self._norm(optimizer)

    def clip(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scale the gradients of `optimizer`, across meshes, to a norm of at most `max_norm`.

        Raises:
            RuntimeError: the norm is not finite, and that is to be an error; on every rank.
        """
        norm = self._norm(optimizer)
        clip_by_norm(_parameters(optimizer), total=norm.total, max_norm=max_norm)

    def allows_step(self, optimizer: Optimizer) -> bool:
        """Whether to step; asked after the hooks and the clipping, of each optimizer, if not all steps are kept."""
        if self.nonfinite != "skip":
            return True
        assert self._trainer is not None
        finite = bool(torch.isfinite(self._norms[_first_parameter(optimizer)].total))
        self.skipped_steps += not finite
        self._trainer.lightning_module.log(SKIPPED_STEPS, float(self.skipped_steps))
        return finite

    def stepped(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or was not to."""
        self._norms.pop(_first_parameter(optimizer), None)

    # Not by `state_dict`: of callbacks that have one, Lightning refuses two in words that do not say why.

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.nonfinite == "skip":
            checkpoint[SKIPPED_STEPS] = self.skipped_steps

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.skipped_steps = checkpoint.get(SKIPPED_STEPS, 0)

    def _norm(self, optimizer: Optimizer) -> GradientNorm:
        assert self._trainer is not None
        experts = {id(parameter) for parameter in self._expert_parameters}
        parts: dict[str, list[nn.Parameter]] = {"dense": [], "experts": []}
        for parameter in _parameters(optimizer):
            parts["experts" if id(parameter) in experts else "dense"].append(parameter)
        device = self._trainer.strategy.root_device
        norm = gradient_norm(parts, norm_type=self.norm_type, group=dist.group.WORLD, device=device)
        if self.nonfinite == "raise" and not torch.isfinite(norm.total):
            raise self._error(norm, _parameters(optimizer))
        module = self._trainer.lightning_module
        # In automatic optimization, a user's clipping takes the norm once more.
        logged = module.automatic_optimization and _first_parameter(optimizer) in self._norms
        self._norms[_first_parameter(optimizer)] = norm
        if self.log_grad_norm and not logged:
            module.log("grad_norm", norm.total)
            module.log_dict({f"grad_norm/{name}": value for name, value in norm.parts.items()})
        return norm

    def _error(self, norm: GradientNorm, parameters: list[nn.Parameter]) -> RuntimeError:
        assert self._trainer is not None
        names = nonfinite_gradients(
            self._trainer.lightning_module,
            parameters,
            group=dist.group.WORLD,
            device=self._trainer.strategy.root_device,
        )
        values = ", ".join(f"{name} {float(value)}" for name, value in norm.parts.items())
        where = (
            f"{len(names)} of {len(parameters)} parameters have gradients with a NaN or an infinity:"
            f" {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
            if names
            else "every gradient is finite, but their norm is too large for fp32"
        )
        return RuntimeError(
            f"the gradient norm is {float(norm.total)} at step {self._trainer.global_step} ({values}). {where}."
            " ExpertGradientCallback(nonfinite='skip') leaves out such steps, 'keep' takes them"
        )


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _first_parameter(optimizer: Optimizer) -> int:
    """Tells optimizers apart, also when Lightning has wrapped one."""
    return id(next(iter(_parameters(optimizer)), None))
