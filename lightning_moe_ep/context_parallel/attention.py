"""Attention over whole sequences, on ranks that hold slices of them.

A plain model goes in. Afterwards its attention modules exchange tokens in the functions by which transformers computes
attention: these are wrapped under the names that they have, once a process, and leave all other modules alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from lightning_moe_ep.context_parallel.masks import TellsSequences, tell_last_position, whole_mask
from lightning_moe_ep.context_parallel.ring import Ring
from lightning_moe_ep.context_parallel.supported import (
    EAGER,
    attention_modules,
    check_supported,
    names_of_forward,
    problem_of_implementation,
    rope_grows,
    rotary_modules,
)
from lightning_moe_ep.context_parallel.ulysses import Ulysses
from lightning_moe_ep.mesh import Meshes

ContextParallelMode = Literal["ulysses", "ring"]
"""How attention sees whole sequences: all-to-all of heads for tokens and back, or keys and values passed around."""

_SPREAD = "_spread_attention"


def spread_attention(model: nn.Module, meshes: Meshes, *, mode: ContextParallelMode) -> None:
    """Have every attention of `model` attend to whole sequences, of which each cp rank holds a slice.

    Before anything is sharded; nothing is changed if it raises.

    Args:
        model: a plain model.
        meshes: their cp group is who holds the slices.
        mode: how.

    Raises:
        NotImplementedError: tokens meet in it otherwise than through transformers' attention interface, or `mode`
            cannot serve it here.
        ValueError: cp does not divide a number of heads.
    """
    cp = meshes.layout.cp
    check_supported(model, cp=cp, mode=mode, device_type=meshes.dense.device_type)
    group, host_group = meshes.cp_mesh.get_group(), meshes.host_cp_group
    assert host_group is not None
    modules = attention_modules(model)
    spread = Ring(group, cp) if mode == "ring" else Ulysses(group, cp, meshes.cp_rank)
    for module in modules:
        setattr(module, _SPREAD, spread)
        _wrap_eager(module)
    of_configs = {id(module.config): module for module in modules}
    keep = partial(_wrap_registered, list(of_configs.values()))
    keep()
    growing: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and attention_modules(module):
            TellsSequences(group, host_group, keep, masks=mode != "ring").install(module)
            if rope_grows(module):
                growing.update({id(rotary): rotary for rotary in rotary_modules(module)})
    for rotary in growing.values():
        tell_last_position(rotary)


def spread_over(model: nn.Module) -> int:
    """The cp for which the attention of `model` is spread; 1 if it is not."""
    return max((getattr(module, _SPREAD).size for module in model.modules() if hasattr(module, _SPREAD)), default=1)


def _wrap_registered(modules: list[nn.Module]) -> None:
    """Wrap the attention and mask functions that are registered by the names that the modules' configs have now."""
    for name, module in {module.config._attn_implementation: module for module in modules}.items():
        if problem := problem_of_implementation(module):
            raise NotImplementedError(f"{problem}; use cp=1, or another attn_implementation")
        flash = is_flash_attention_requested(requested_attention_implementation=name)
        if name != "eager" and not _is_wrapped(function := ALL_ATTENTION_FUNCTIONS[name]):
            AttentionInterface.register(name, _wrapped_attention(function, flash=flash))
        if not _is_wrapped(function := ALL_MASK_ATTENTION_FUNCTIONS[name]):
            AttentionMaskInterface.register(name, _wrapped_mask(function, flash=flash))


def _wrap_eager(module: nn.Module) -> None:
    """Wrap the function that the module's own file has for "eager", which no register names."""
    names = names_of_forward(module)
    if EAGER in names and not _is_wrapped(names[EAGER]):
        names[EAGER] = _wrapped_attention(names[EAGER], flash=False)


def _is_wrapped(function: Callable[..., Any]) -> bool:
    return hasattr(function, _SPREAD)


def _wrapped_attention(function: Callable[..., Any], *, flash: bool) -> Callable[..., Any]:
    @wraps(function)
    def attention(module: nn.Module, *args: Any, **options: Any) -> Any:
        spread = getattr(module, _SPREAD, None)
        if spread is None:
            return function(module, *args, **options)
        return spread(function, module, *args, flash=flash, **options)

    setattr(attention, _SPREAD, True)
    return attention


def _wrapped_mask(function: Callable[..., Any], *, flash: bool) -> Callable[..., Any]:
    @wraps(function)
    def mask(**options: Any) -> Any:
        return whole_mask(function, flash=flash, **options)

    setattr(mask, _SPREAD, True)
    return mask
