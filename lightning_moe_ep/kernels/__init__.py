"""Kernels that are chosen by name, apart from the layout: put into a plain model before it is sharded.

A list of names goes in: attention and experts implementations of transformers, "liger", "fla". Each takes effect or is
refused, by what can be known at the time: the names themselves and what is installed at once, the rest with the model.
"""

from lightning_moe_ep.kernels.apply import apply_kernels
from lightning_moe_ep.kernels.liger import has_fused_loss, summing
from lightning_moe_ep.kernels.names import check_kernels, computation_for, kernel_named, without_kernels_for_bf16

__all__ = [
    "apply_kernels",
    "check_kernels",
    "computation_for",
    "has_fused_loss",
    "kernel_named",
    "summing",
    "without_kernels_for_bf16",
]
