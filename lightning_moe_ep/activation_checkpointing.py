"""Activation checkpointing and compilation of a model's blocks, before FSDP2 wraps them.

Plain blocks go in. Their `forward` is replaced, so that names of parameters stay as they are, FSDP2's hooks stay
outside of what is recomputed, and a checkpoint stands around what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Literal, get_args

import torch
from torch import nn

# Private; read at torch 2.13.0. A test fails when they move.
from torch._dynamo import OptimizedModule
from torch._dynamo import config as dynamo
from torch.utils.checkpoint import checkpoint

from lightning_moe_ep.remember import Contexts, remember_exchange, remember_routing

ActivationCheckpointing = Literal["none", "full", "selective"]
"""What of a block is kept for backward: all; its inputs and the routing; or also the rows that were exchanged."""

_CONTEXTS: dict[str, Callable[[], Contexts]] = {"full": remember_routing, "selective": remember_exchange}

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache", "cache_params")
"""What blocks of transformers call what they write keys and values into; a second time when they are recomputed."""


def wrap_forwards(
    blocks: Sequence[nn.Module], *, activation_checkpointing: ActivationCheckpointing, compiles: bool
) -> None:
    """Compile the forward of `blocks`, and have backward recompute it.

    A model of transformers whose own checkpointing is on has it replaced, by "full" if nothing else is asked for, in
    the blocks in which it is on.

    Args:
        blocks: a model's transformer blocks.
        activation_checkpointing: what is kept for backward.
        compiles: whether each block is compiled by `torch.compile`.

    Raises:
        ValueError: a block that is to be recomputed is compiled already.
    """
    own = [block for block in blocks if _checkpoints_itself(block)]
    if activation_checkpointing == "none" and own:
        activation_checkpointing, recomputed = "full", own
    else:
        recomputed = [] if activation_checkpointing == "none" else list(blocks)
    for block in recomputed:
        if isinstance(block, OptimizedModule) or block._compiled_call_impl is not None:
            raise ValueError(
                f"a {type(block).__name__} is compiled already, and a checkpoint inside of what is compiled would not"
                " keep the routing; leave the compilation to compile_blocks=True"
            )
    if compiles:
        # torch 2.13: otherwise what was compiled for modules without hooks stands for others of their classes that have
        # some (a second model in the process, whose router logits are kept, or whose routers are in fp32).
        dynamo.skip_nnmodule_hook_guards = False
    for block in blocks:
        for module in block.modules():
            if _checkpoints_itself(module):
                module.gradient_checkpointing = False
        if compiles:
            block.forward = torch.compile(block.forward)
    for block in recomputed:
        block.forward = Recomputed(block, _CONTEXTS[activation_checkpointing])


def check_activation_checkpointing(value: str) -> None:
    """
    Raises:
        ValueError: there is no such kind.
    """
    if value not in get_args(ActivationCheckpointing):
        raise ValueError(
            f"activation_checkpointing={value!r} is not known; use one of {list(get_args(ActivationCheckpointing))}"
        )


class Recomputed:
    """A block's forward, of which backward has the inputs and what `context_fn` keeps."""

    def __init__(self, block: nn.Module, context_fn: Callable[[], Contexts]) -> None:
        self._block, self._forward, self._context_fn = block, block.forward, context_fn
        update_wrapper(self, block.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._block.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        kwargs.update({name: None for name in _CACHES if name in kwargs})
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._context_fn, **kwargs)


def _checkpoints_itself(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True
