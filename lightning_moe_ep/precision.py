"""The Trainer's precision as FSDP2's mixed precision.

Lightning's plugin goes in, `FSDP2Precision` comes out: no autocast, but FSDP2's policy, with gradients reduced in
fp32. It is also where Lightning's clipping by norm arrives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe_ep.callbacks import ExpertGradientCallback
from lightning_moe_ep.experts import choice_biases, modules_called
from lightning_moe_ep.gradients import local_gradients

SUPPORTED = ("32-true", "bf16-mixed", "bf16-true")
FP16 = ("16-mixed", "16-true", "16")
"""What Lightning calls it."""


class FSDP2Precision(Precision):
    """Precision by FSDP2's `MixedPrecisionPolicy`.

    * `32-true`: everything in fp32.
    * `bf16-mixed`: weights are kept in fp32 and gathered in bf16.
    * `bf16-true`: weights are kept in bf16.

    In both bf16 modes gradients are reduced in fp32, and what the roots return is fp32.
    """

    def __init__(self, precision: str) -> None:
        """
        Args:
            precision: one of `SUPPORTED`.

        Raises:
            ValueError: another precision; says which work.
        """
        if precision not in SUPPORTED:
            why = " (fp16 would need its loss scaled; bf16 has the range of fp32)" if precision in FP16 else ""
            raise ValueError(
                f"precision={precision!r} is not supported with expert parallelism{why}; use one of {SUPPORTED}"
            )
        self.precision = precision
        self.fp32_modules: Sequence[str] = ()
        """Set by the strategy: names of modules that are kept in fp32, see `modules_called`."""
        self.gradients: ExpertGradientCallback | None = None
        """Set by the strategy: clips across meshes, and says whether to step."""

    @classmethod
    def from_plugin(cls, plugin: Precision) -> FSDP2Precision:
        """The equivalent of one of Lightning's plugins.

        Raises:
            ValueError: a plugin, or a precision of it, that cannot be turned into FSDP2's policy.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) not in (Precision, HalfPrecision, MixedPrecision, DoublePrecision):
            raise ValueError(
                f"the precision plugin {type(plugin).__name__} is not supported with expert parallelism; leave it out"
                f" and give the Trainer precision= one of {SUPPORTED}"
            )
        return cls(plugin.precision)

    @property
    def parameter_dtype(self) -> torch.dtype:
        """What weights are kept in."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.precision == "32-true":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert floating parameters to what they are kept in; buffers keep their dtype. Before sharding.

        So do the biases that routers choose by: they are updated by steps that bf16 would round away.
        """
        if self.precision == "bf16-true":
            kept = {id(bias.tensor) for bias in choice_biases(module)}
            kept |= {id(p) for part in modules_called(module, self.fp32_modules) for p in part.parameters()}
            for parameter in module.parameters():
                if parameter.is_floating_point() and id(parameter) not in kept:
                    parameter.data = parameter.data.to(self.parameter_dtype)
        return module

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(self.parameter_dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return _default_dtype(self.parameter_dtype)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val <= 0:
            return
        assert self.gradients is not None
        self.gradients.clip(optimizer, clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        # Torch's own refuses sharded gradients together with whole ones.
        if clip_val > 0:
            for gradient in local_gradients(p for group in optimizer.param_groups for p in group["params"]):
                gradient.clamp_(-clip_val, clip_val)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, model: L.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self.gradients is not None
        if self.gradients.nonfinite == "keep":
            result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        else:
            # Within `optimizer.step` it is too late to leave it out.
            result = self._wrap_closure(model, optimizer, closure)
            if self.gradients.allows_step(optimizer):
                optimizer.step(**kwargs)
        self.gradients.stepped(optimizer)
        return result

    @override
    def _clip_gradients(self, model: L.LightningModule, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        try:
            super()._clip_gradients(model, optimizer, *args, **kwargs)
        except RuntimeError as error:
            if "mesh" in str(error):
                error.add_note(
                    "configure_gradient_clipping calls torch.nn.utils.clip_grad_norm_? That takes no experts, which are"
                    " on a mesh of their own: let it call self.clip_gradients(optimizer, gradient_clip_val=...,"
                    " gradient_clip_algorithm='norm') instead"
                )
            raise


def refuse_fp16_in_disguise() -> None:
    """Look at what the Trainer that is being built was given as its precision.

    lightning 2.6: with accelerator="cpu" it makes bf16-mixed of 16-mixed before a strategy given by name exists, and
    keeps no trace of it but the argument of its constructor, which is running.

    Raises:
        ValueError: fp16.
    """
    constructor = inspect.unwrap(L.Trainer.__init__).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not constructor:
        frame = frame.f_back
    if frame is not None and str(frame.f_locals["precision"]) in FP16:
        FSDP2Precision(str(frame.f_locals["precision"]))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
