"""What context parallelism can spread, told before anything is changed."""

from __future__ import annotations

from inspect import signature

from torch import nn
from transformers import PreTrainedModel

from lightning_moe_ep.context_parallel.ulysses import calls_attention_interface
from lightning_moe_ep.layout import divisors_of

_ALONG_TOKENS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that compute attention through transformers' interface."""
    return [module for module in model.modules() if calls_attention_interface(type(module))]


def check_supported(model: nn.Module, *, cp: int) -> None:
    """Check that tokens meet in the model's attention and nowhere else.

    Raises:
        NotImplementedError: they do, or it cannot be told.
        ValueError: `cp` does not divide a number of heads.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    within = {id(module) for each in models for module in attention_modules(each)}
    if not within or any(id(module) not in within for module in attention_modules(model)):
        raise NotImplementedError(
            f"cp={cp}: {type(model).__name__} is no model of transformers whose attention goes through its attention"
            " interface (ALL_ATTENTION_FUNCTIONS), which is where cp ranks exchange tokens; derive it from"
            " PreTrainedModel and use the interface, or use cp=1"
        )
    for each in models:
        _check_model(each, cp)
    for name, module in model.named_modules():
        if isinstance(module, _ALONG_TOKENS):
            raise NotImplementedError(
                f"cp={cp}: in {name} ({type(module).__name__}) tokens meet outside of attention; use cp=1"
            )
    for module in attention_modules(model):
        heads = module.config.num_attention_heads
        if heads % cp:
            raise ValueError(
                f"cp={cp} does not divide the {heads} attention heads of {type(module).__name__}; use one of"
                f" {divisors_of(heads)}"
            )


def _check_model(model: PreTrainedModel, cp: int) -> None:
    if not attention_modules(model):
        return
    kind = model.config.model_type
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise NotImplementedError(f"cp={cp}: {kind} has layers of {sorted(kinds)}, which know a slice only; use cp=1")
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(f"cp={cp}: {kind} has an encoder and a decoder; use cp=1")
    if "position_ids" not in signature(model.forward).parameters:
        raise NotImplementedError(f"cp={cp}: {kind} takes no position_ids, and counts from 0 in each slice; use cp=1")
