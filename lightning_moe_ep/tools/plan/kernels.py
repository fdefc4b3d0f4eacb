"""Kernels as they are on the device that is planned, where tensors without data have none like them.

Each keeps for backward what the kernel keeps, and gives gradients of the right size. torch 2.13: without data,
grouped_mm takes bf16 only, and attention is that of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import masking_utils

from lightning_moe_ep.context_parallel import masks
from lightning_moe_ep.kernels import kernel_named
from lightning_moe_ep.transformers_models import outermost_models


@contextmanager
def kernels(*, fused_attention: bool) -> Iterator[None]:
    """Put them in place of torch's, for all that is called inside; in a process that computes nothing else.

    Not by a mode for functions: torch 2.13 does not ask it in a backward, where a forward may be recomputed.

    Args:
        fused_attention: whether attention is one kernel that keeps no scores, as on GPUs. Else it is as on this CPU,
            which keeps all of them where keys and values are of different sizes.
    """
    grouped, attention = F.grouped_mm, F.scaled_dot_product_attention
    F.grouped_mm = _grouped_mm
    if fused_attention:
        F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.grouped_mm, F.scaled_dot_product_attention = grouped, attention


@contextmanager
def unpadded() -> Iterator[None]:
    """Have sequences, and those that slices are of, be without padding, one a row.

    Nothing can be read of tensors without data: neither what ranks tell each other of slices nor where positions begin
    anew, for which transformers would make a mask of every pair of tokens that a run without packing has not.
    """
    agree, whole, packed = masks._agree, masks._whole_sequences, masking_utils.find_packed_sequence_indices

    def whole_sequences(ids: Any, mask: Tensor, positions: Tensor, group: dist.ProcessGroup) -> masks.WholeSequences:
        whole = group.size() * mask.shape[1]
        return masks.WholeSequences(mask.shape[1], whole, last=positions.new_full((), whole - 1))

    masks._agree, masks._whole_sequences = lambda *_: None, whole_sequences
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks._agree, masks._whole_sequences = agree, whole
        masking_utils.find_packed_sequence_indices = packed


def _grouped_mm(mat_a: Tensor, mat_b: Tensor, **_: Any) -> Tensor:
    return _GroupedMM.apply(mat_a, mat_b)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return _Attention.apply(query, key, value)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(len(rows), weights.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            tensor.new_empty(tensor.shape) if needed else None
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            tensor.new_empty(tensor.shape) if needed else None
            for tensor, needed in zip(ctx.saved_tensors[:3], ctx.needs_input_grad, strict=True)
        )


def with_kernels(build: Callable[[], nn.Module], names: Sequence[str]) -> tuple[Callable[[], nn.Module], list[str]]:
    """`build` whose models compute with a run's `kernels`, as far as that can be traced; and what cannot, in lines.

    They need not be installed here. Any attention that is one kernel keeps what torch's own keeps.

    Raises:
        ValueError: a name is not known.
    """
    kernels = [kernel_named(name) for name in names]
    told = {
        "liger": "liger's loss keeps no logits, which are planned with the activations",
        "fla": "linear attention is planned as transformers computes it without flash-linear-attention",
        "sonicmoe": "experts are planned as transformers computes them by itself, not by sonicmoe",
    }
    return partial(_built_with, build, tuple(names)), [told[k.name] for k in kernels if k.name in told]


def _built_with(build: Callable[[], nn.Module], names: Sequence[str]) -> nn.Module:
    model = build()
    for kernel in map(kernel_named, names):
        for _, top in outermost_models(model):
            if kernel.kind == "attention":
                eager = kernel.name == "eager" or not top._supports_sdpa
                top.set_attn_implementation("eager" if eager else "sdpa")
            elif kernel.kind == "experts" and kernel.name != "sonicmoe":
                top.set_experts_implementation(kernel.name)
    return model
