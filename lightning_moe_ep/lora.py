"""LoRA adapters of a parallel model: saving them as PEFT does, and merging them into the weights.

A PEFT model that `parallelize` has been over goes in, on all ranks; what plain PEFT would give comes out, on rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_moe_ep.experts import is_a, plain_class, to_plain
from lightning_moe_ep.shards import gather


def save_adapter(
    model: nn.Module,
    save_directory: str | Path,
    *,
    selected_adapters: Sequence[str] | None = None,
    save_embedding_layers: bool | Literal["auto"] = "auto",
    safe_serialization: bool = True,
) -> None:
    """Write adapters as PEFT's own `save_pretrained` would for the plain model; every rank calls this.

    A parallel model's `save_pretrained` is this function.

    Args:
        model: a parallel `PeftModel`.
        save_directory: where to; rank 0 writes.
        selected_adapters: which; None: all of them.
        save_embedding_layers: as in PEFT.
        safe_serialization: as in PEFT.

    Raises:
        TypeError: `model` is not a PeftModel.
        ValueError: there is no adapter of a selected name.
    """
    _check(model)
    names = list(model.peft_config) if selected_adapters is None else list(selected_adapters)
    if unknown := [name for name in names if name not in model.peft_config]:
        raise ValueError(f"no adapter is named {unknown[0]!r}; use some of {list(model.peft_config)}")
    state, first = model.state_dict(), dist.get_rank() == 0
    chosen: list[list[str]] = [[]]
    if first:  # it may ask the network
        from peft import get_peft_model_state_dict

        asked = {"state_dict": state, "save_embedding_layers": save_embedding_layers}
        of_adapters = [get_peft_model_state_dict(model, adapter_name=name, **asked) for name in names]
        ids = {id(value) for of_adapter in of_adapters for value in of_adapter.values()}
        chosen = [[key for key, value in state.items() if id(value) in ids]]
    dist.broadcast_object_list(chosen, src=0)
    whole = _whole(model, {key: state[key] for key in chosen[0]})
    if first:
        type(model).save_pretrained(
            model,
            str(save_directory),
            safe_serialization=safe_serialization,
            selected_adapters=names,
            save_embedding_layers=save_embedding_layers,
            state_dict=whole,
        )
    dist.barrier()


def merged_model(model: nn.Module) -> PreTrainedModel | None:
    """The plain model, on the CPU of rank 0, with the active adapters merged into its weights; every rank calls this.

    It is built anew from its configuration and merged by PEFT's `merge_and_unload`; the parallel model stays as it is.
    Rank 0 needs memory for the whole model.

    Args:
        model: a parallel `PeftModel` around a model of transformers.

    Returns:
        On rank 0 a model to call `save_pretrained` or `state_dict` of; None on the others.

    Raises:
        TypeError: `model` is not a PeftModel, or what it wraps is not of transformers.
    """
    _check(model)
    base = model.get_base_model()
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"{type(base).__name__} cannot be built anew from a configuration, as it is not a PreTrainedModel; save the"
            " adapter with save_adapter and merge it in one process: PeftModel.from_pretrained(plain_model,"
            " folder).merge_and_unload()"
        )
    whole = _whole(model, model.state_dict())
    if dist.get_rank() != 0:
        return None
    from peft import get_peft_model

    with torch.device("meta"):
        configs = copy.deepcopy(model.peft_config)
        first, *others = configs
        plain = get_peft_model(plain_class(base)(copy.deepcopy(base.config)), configs[first], adapter_name=first)
        for name in others:
            plain.add_adapter(name, configs[name])
    plain.base_model.set_adapter(model.active_adapters)
    plain.load_state_dict(whole, assign=True)
    plain.get_base_model().tie_weights()
    for name, buffer in model.named_buffers():  # those that are not part of the state
        owner, _, key = name.rpartition(".")
        if plain.get_buffer(name).is_meta:
            plain.get_submodule(owner)._buffers[key] = buffer.detach().cpu()
    return plain.merge_and_unload()


def guard_peft(model: nn.Module) -> None:
    """Have what PEFT's methods do to a whole model done right, or refused, for every PeftModel in a parallel model."""
    for module in model.modules():
        if not is_a(module, "PeftModel"):
            continue
        module.save_pretrained = partial(save_adapter, module)
        merged = "to get the merged model, call lightning_moe_ep.merged_model(model) on all ranks"
        for name in ("merge_and_unload", "merge_adapter", "unload"):
            if hasattr(module.base_model, name):
                setattr(module.base_model, name, partial(_refuse, name, merged))
        for name in ("add_adapter", "load_adapter", "delete_adapter"):
            setattr(module, name, partial(_refuse, name, "do it before the model is parallelized"))


def _refuse(name: str, way_out: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"{name} is not possible once a model is sharded over ranks; {way_out}")


def _check(model: nn.Module) -> None:
    if not is_a(model, "PeftModel"):
        raise TypeError(f"{type(model).__name__} is not a PeftModel; pass what get_peft_model returned")


def _whole(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with whole tensors, in the plain model's form, on the CPU of rank 0; `{}` on the others."""
    whole = {key: gather(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    if dist.get_rank() != 0:
        return {}
    return to_plain(model, whole)
