"""Models of transformers in a module: finding them, and what one needs to stay itself when it is parallel.

Its own methods go on working where every rank can take part, and are refused where they would do something else to a
part of a model than to the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

# Private; read at transformers 5.24.0. A test fails when it moves.
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


def outermost_models(module: nn.Module, path: str = "") -> list[tuple[str, PreTrainedModel]]:
    """The models of transformers in a module, by their paths, without those that are part of another."""
    if isinstance(module, PreTrainedModel):
        return [(path, module)]
    children = module.named_children()
    return [found for name, child in children for found in outermost_models(child, f"{path}.{name}".lstrip("."))]


def keep_methods(model: nn.Module, roots: Sequence[nn.Module]) -> None:
    """Have the methods of transformers models in `model` done right, or refused; once FSDP2 has wrapped them.

    Args:
        model: the parallel model.
        roots: the modules of it that are called from outside.
    """
    for root in roots:
        if isinstance(root, PreTrainedModel):
            # It looks up by the class's name which outputs (router logits, hidden states) it can record, and FSDP2
            # has given it another class; without this they would be missing without a word.
            _CAN_RECORD_REGISTRY[root] = root._can_record_outputs
        if hasattr(root, "generate"):
            if dist.get_world_size() > 1:
                root.generate = partial(_generate, root.generate)
            register_fsdp_forward_method(root, "generate")
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.resize_token_embeddings = partial(
                _refuse, module, "call resize_token_embeddings on the plain model, in configure_model"
            )
            module._set_gradient_checkpointing = partial(_set_checkpointing, module, module._set_gradient_checkpointing)


def _generate(generate: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`generate` that goes on on every rank until the last one has its text, as each forward gathers weights.

    transformers does so by itself for DeepSpeed and FSDP1 only.
    """
    return generate(*args, **{"synced_gpus": True, **options})


def _set_checkpointing(model: nn.Module, given: Callable[..., None], *args: Any, **options: Any) -> None:
    if args[:1] == (False,) or options.get("enable") is False or options.get("value") is False:
        given(*args, **options)
        return
    _refuse(model, "switch its checkpointing on in configure_model, or give activation_checkpointing='full'")


def _refuse(model: nn.Module, way_out: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"{type(model).__name__.removeprefix('FSDP')} is sharded over ranks already; {way_out}")
