"""Ring attention, by torch: keys and values pass from rank to rank, and each keeps its own tokens and all heads.

It serves plain causal attention by torch's flash kernels, and nothing that would need a mask. A rank with late tokens
has more to do than one with early ones, as slices are cut in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Private; read at torch 2.13.0. A test fails when they move.
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

_TOKENS = 2
"""The dimension of tokens."""
_OF_CUDA = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
"""What the kernel of CUDA hands from forward to backward."""


@dataclass(frozen=True)
class Ring:
    """The ranks that hold slices of the same sequences, in their order; called as `Ulysses` is."""

    group: dist.ProcessGroup
    size: int

    @torch.compiler.disable
    def __call__(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        *,
        flash: bool,
        **options: Any,
    ) -> tuple[Tensor, None]:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        odd = [name for name in ("position_bias", "softcap", "s_aux", "sinks") if options.get(name) is not None]
        shapes = [list(tensor.shape) for tensor in (query, key, value)]
        unlike = query.shape[2:] != key.shape[2:] or key.shape != value.shape
        if attention_mask is not None or dropout or not causal or odd or unlike:
            raise NotImplementedError(
                f"cp_mode='ring' has causal attention alone, but {type(module).__name__} asks for more (dropout"
                f" {dropout}, {'a' if attention_mask is not None else 'no'} mask, causal {causal}, {odd}, queries, keys"
                f" and values of {shapes}); use cp_mode='ulysses'"
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        output: Tensor = _RingAttention.apply(query, key, value, self.group, scaling)
        return output.transpose(1, 2).contiguous(), None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, scale: float | None
    ) -> Tensor:
        operator, _ = _kernels(query.device.type)
        with _slices_in_order():
            out, sums, *rest = _templated_ring_attention(
                group, _TOKENS, operator, query, key, value, is_causal=True, dropout_p=0.0, scale=scale
            )
        ctx.group, ctx.scale = group, scale
        ctx.rest = dict(zip(_OF_CUDA, rest, strict=False))
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        _, operator = _kernels(query.device.type)
        kept = (query, key, value, out, sums)
        options = {"is_causal": True, "dropout_p": 0.0, "scale": ctx.scale, **ctx.rest}
        with _slices_in_order():
            gradients = _templated_ring_attention_backward(
                ctx.group, _TOKENS, operator, grad.contiguous(), "grad_out", *kept, **options
            )
        return (*gradients[:3], None, None)


def _kernels(device_type: str) -> tuple[Any, Any]:
    aten = torch.ops.aten
    if device_type == "cuda":
        return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward.default
    return aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def _slices_in_order() -> Iterator[None]:
    """torch deals the tokens of a sequence out from both ends otherwise, and says so by an option of the process."""
    given, _cp_options.enable_load_balance = _cp_options.enable_load_balance, False
    try:
        yield
    finally:
        _cp_options.enable_load_balance = given
