"""The two kinds of experts modules that are found by structure, whatever their class.

Both own stacked weights `[E, ...]` and are called with `(hidden [T, H], top_k_index [T, K], top_k_weights [T, K])`.
`StackedExperts` has the form that transformers describes, and we compute it. `NativeExperts` has any other, and its own
forward computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Computation, Dispatch, ExpertsAdapter, local_parameter, register_experts
from lightning_moe_ep.experts.compute import compute_experts, expert_counts, native, up_name
from lightning_moe_ep.experts.spread import spread_of
from lightning_moe_ep.rows import RowGroups


def stacked_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `module` itself that have three dimensions."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return {}
    return {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 3}


def positional_arguments(module: nn.Module) -> list[str]:
    """What the module's forward takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]


def _is_called_as_experts(module: nn.Module) -> bool:
    stacked = stacked_parameters(module)
    return len({p.shape[0] for p in stacked.values()}) == 1 and len(positional_arguments(module)) == 3


@register_experts
class NativeExperts(ExpertsAdapter):
    """Stacked experts of any form; the module's own forward computes, on the experts of this rank."""

    computations = frozenset({"auto", "native"})

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        num_experts = next(iter(stacked_parameters(module).values())).shape[0]
        self.parameters = [name for name, p in module.named_parameters(recurse=False) if p.shape[:1] == (num_experts,)]
        self._arguments = positional_arguments(module)

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        # That it says how many experts it has tells it from other modules with weights of three dimensions, and is
        # what its forward may use.
        if _is_called_as_experts(module) and expert_counts(module):
            return cls(module)
        return None

    @override
    def install(self, dispatch: Dispatch, *, alone: bool) -> None:
        # Outside of what is compiled at every ep: torch 2.13 traces a grouped_mm in bf16 only.
        own = self.module.forward

        @torch.compiler.disable
        def original(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            if (spread := spread_of(self.module)) is not None:
                index, weights = spread.route(index, weights)
            return own(hidden, index, weights)

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, index, weights = (*args, *(kwargs[name] for name in self._arguments[len(args) :]))
            if alone and hidden.numel():
                return original(hidden, index, weights)
            # With zero tokens each weight still gets a gradient, which the other ranks reduce.
            output = dispatch(hidden.flatten(0, -2), index.flatten(0, -2), weights.flatten(0, -2))
            return output.view(*hidden.shape[:-1], output.shape[-1])

        self.module.forward = forward

    @override
    def compute(self, rows: Tensor, groups: RowGroups, weights: Tensor | None, *, computation: Computation) -> Tensor:
        if len(rows):
            return native(self.module, rows, groups, weights)
        return with_zero_gradients(rows, [local_parameter(self.module, n) for n, _ in self.module.named_parameters()])


@register_experts
class StackedExperts(NativeExperts):
    """Two-layer experts as transformers describes them; see `compute_experts`."""

    computations = frozenset({"auto", "grouped_mm", "loop", "native"})
    by_compute_experts = True
    knows_none = False  # transformers 5.24: grouped_mm leaves rows of such ids as they happen to be

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        if not _is_called_as_experts(module):
            return None
        up = up_name(module)
        expected = {up, "down_proj"}
        names = {name for name, _ in module.named_parameters()}
        biases = {f"{name}_bias" for name in expected}
        norm = {
            n for n in names if getattr(module, "has_post_expert_norm", False) and n.startswith("post_expert_norm.")
        }
        if names - norm not in (expected, expected | biases):
            return None
        gated = up == "gate_up_proj" and hasattr(module, "_apply_gate")
        plain = up == "up_proj" and not getattr(module, "has_gate", True) and hasattr(module, "act_fn")
        up_weight, down_weight = (module.get_parameter(name) for name in (up, "down_proj"))
        if getattr(module, "is_transposed", False):
            up_weight, down_weight = up_weight.mT, down_weight.mT
        width = down_weight.shape[2] * (2 if gated else 1)
        fits = up_weight.shape[1:] == (width, down_weight.shape[1])
        return cls(module) if (gated or plain) and fits else None

    @override
    def compute(self, rows: Tensor, groups: RowGroups, weights: Tensor | None, *, computation: Computation) -> Tensor:
        return compute_experts(self.module, rows, groups, weights, computation=computation)


def with_zero_gradients(output: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """`output`, of which each of `tensors` that requires a gradient gets one that is zero.

    Unlike adding a product with zero, it makes no NaN of what is not finite.
    """
    return _WithZeroGradients.apply(output, *(tensor for tensor in tensors if tensor.requires_grad))


class _WithZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
