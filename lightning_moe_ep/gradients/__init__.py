"""Gradients of sharded parameters: scaling, the norm, clipping. Tensors and process groups, no Lightning."""

from lightning_moe_ep.gradients.norm import GradientNorm, clip_by_norm, grad_norm, gradient_norm, nonfinite_gradients
from lightning_moe_ep.gradients.scale import (
    average_gradients,
    is_replicated,
    local_gradients,
    local_tensor,
    scale_gradients,
)

__all__ = [
    "GradientNorm",
    "average_gradients",
    "clip_by_norm",
    "grad_norm",
    "gradient_norm",
    "is_replicated",
    "local_gradients",
    "local_tensor",
    "nonfinite_gradients",
    "scale_gradients",
]
