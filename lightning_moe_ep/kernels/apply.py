"""Putting the kernels that were asked for into a plain model, one kind after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from transformers import PreTrainedModel

from lightning_moe_ep.experts import NoExpertsError, find_experts
from lightning_moe_ep.kernels.delta_rule import use_flash_linear_attention
from lightning_moe_ep.kernels.liger import use_liger
from lightning_moe_ep.kernels.names import Kernel, NothingToComputeError, check_kernels, is_flash
from lightning_moe_ep.transformers_models import outermost_models


def apply_kernels(model: nn.Module, names: Sequence[str], *, device_type: str) -> None:
    """Have the transformers models in `model` compute with these kernels, and say so in the log.

    One of several that has no experts, or none of the layers that "fla" computes, stays as it is: a reward model may be
    dense.

    Args:
        model: plain.
        names: see `check_kernels`, also for its errors.
        device_type: where the model will compute.

    Raises:
        ValueError: there is no transformers model, or it cannot have a kernel, or the device cannot run it.
    """
    kernels = check_kernels(names)
    if not kernels:
        return
    tops = dict.fromkeys(top for _, top in outermost_models(model))
    if not tops:
        raise ValueError(
            f"kernels={list(names)} are put into models of transformers, but {type(model).__name__} holds none; choose"
            " kernels in your own code, and leave kernels out"
        )
    use: dict[str, Callable[[PreTrainedModel, Kernel, str], str]] = {
        "attention": _use_attention,
        "experts": _use_experts,
        "liger": use_liger,
        "fla": use_flash_linear_attention,
    }
    told: list[str] = []
    for kernel in kernels:
        without: list[NothingToComputeError] = []
        for top in tops:
            try:
                told.append(f"{kernel.given} ({use[kernel.kind](top, kernel, device_type)})")
            except NothingToComputeError as error:
                without.append(error)
        if len(without) == len(tops):
            raise without[0]
    rank_zero_info(f"Kernels: {', '.join(told)}")


def _use_attention(model: PreTrainedModel, kernel: Kernel, device_type: str) -> str:
    known = {
        "eager": True,
        "sdpa": model._supports_sdpa,
        "flex_attention": model._supports_flex_attn,
        "flash_attention_2": model._supports_flash_attn,
        "flash_attention_3": model._supports_flash_attn,
    }
    way_out = (
        f"use one of {[name for name in known if known[name] and not (device_type == 'cpu' and _needs_gpu(name))]}"
    )
    if device_type == "cpu" and _needs_gpu(kernel.name):
        raise ValueError(f"kernels has {kernel.given!r}, which does not train on a CPU; {way_out}")
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"kernels has {kernel.given!r}, but {type(model).__name__} has an attention of its own, which is not chosen"
            " by name; leave it out"
        )
    try:
        model.set_attn_implementation(kernel.name)
    except (ValueError, ImportError) as error:
        what = f"kernels has {kernel.given!r}, which {type(model).__name__} cannot have"
        raise type(error)(f"{what}; {way_out}. transformers says: {error}") from error
    used = model.config._attn_implementation
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != used:
            raise ValueError(
                f"kernels has {kernel.given!r}, but {type(part).__name__} inside of {type(model).__name__} stays with"
                f" {part.config._attn_implementation!r}; {way_out}"
            )
    return f"attention of {type(model).__name__}" + ("" if used == kernel.name else f", as {used}")


def _needs_gpu(name: str) -> bool:
    return is_flash(name) or name == "flex_attention"  # torch 2.13 has no backward of it on a CPU


def _use_experts(model: PreTrainedModel, kernel: Kernel, device_type: str) -> str:
    if kernel.name == "sonicmoe" and device_type != "cuda":
        raise ValueError(f"kernels has {kernel.given!r}, which runs on GPUs of NVIDIA only, not on {device_type}")
    holders = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(part._can_set_experts_implementation() for part in holders):
        try:
            find_experts(model)
        except NoExpertsError:
            raise NothingToComputeError(
                f"kernels has {kernel.given!r}, but {type(model).__name__} has no experts"
            ) from None
        raise ValueError(
            f"kernels has {kernel.given!r}, but the experts of {type(model).__name__} compute in one way only; leave it"
            " out, or choose by computation"
        )
    model.set_experts_implementation(kernel.name)
    return f"experts of {type(model).__name__}, which compute by their own forward"
