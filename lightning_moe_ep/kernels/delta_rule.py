"""flash-linear-attention for the families whose layers have a delta rule in chunks.

transformers uses it by itself where it could be imported before the model's code was; asked for by name it has to be
there, and its chunks may have another size. That goes to the kernel by a keyword which transformers does not pass on
(read at transformers 5.24 and flash-linear-attention 0.6), so the function that a family's layers call is replaced, in
the family's module, by one that does so in the layers of this model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightning_moe_ep.kernels.names import Kernel, NothingToComputeError

_RULES = {
    "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", (16, 32, 64)),
    "chunk_kimi_delta_attention": ("fla.ops.kda", "chunk_kda", (32, 64)),
}
"""By the name of the function in a family's module: the kernel's module and name, and the sizes of its chunks."""

_size: ContextVar[int | None] = ContextVar("size", default=None)
"""Of the layer that is running."""


def use_flash_linear_attention(model: PreTrainedModel, kernel: Kernel, device_type: str) -> str:
    """Have the model's layers call the kernel; what comes out says what was done.

    Raises:
        NothingToComputeError: the model has no such layer.
        ValueError: the device or the kernel cannot.
    """
    if device_type == "cpu":
        raise ValueError(f"kernels has {kernel.given!r}, which is Triton's and runs on GPUs; leave it out on a CPU")
    layers = {layer: rule for layer in model.modules() if (rule := _rule_of(layer)) is not None}
    if not layers:
        raise NothingToComputeError(
            f"kernels has {kernel.given!r}, but {type(model).__name__} has no layer that flash-linear-attention"
            " computes (as those of Qwen3-Next and Kimi Linear); leave it out"
        )
    for layer, rule in layers.items():
        module, name, sizes = _RULES[rule]
        if kernel.chunk_size not in sizes:
            raise ValueError(f"kernels has {kernel.given!r}, but chunks of {name} have one of {sizes} tokens")
        family = _code_of(layer).__globals__
        if not isinstance(family[rule], partial):
            family[rule] = partial(_call, family[rule], getattr(importlib.import_module(module), name))
        layer.forward = partial(_with_size, kernel.chunk_size, layer.forward)
    return f"{len(layers)} layers of {type(model).__name__}, in chunks of {kernel.chunk_size} tokens"


def _rule_of(layer: nn.Module) -> str | None:
    """Which of `_RULES` the layer's own forward calls."""
    return next((rule for rule in _RULES if rule in _code_of(layer).__code__.co_names), None)


def _code_of(layer: nn.Module) -> FunctionType:
    """The layer's forward as its family wrote it."""
    return inspect.unwrap(type(layer).forward)


def _with_size(size: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _size.set(size)
    try:
        return forward(*args, **kwargs)
    finally:
        _size.reset(token)


def _call(usual: Callable[..., Any], kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The kernel, in a layer that has a size, else what the family calls."""
    size = _size.get()
    if size is None:
        return usual(*args, **kwargs)
    takes = inspect.signature(kernel).parameters  # layers pass on all that the model was called with
    return kernel(*args, chunk_size=size, **{name: value for name, value in kwargs.items() if name in takes})
