"""The plain model of a checkpoint, built anew on the meta device, and its weights by the names that it has for them.

A checkpoint goes in that may hold the weights as the parallel model has them; rows of the plain model's tensors come
out, wherever they are.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lightning_moe_ep.checkpoint.pieces import describe_pieces, to_plain
from lightning_moe_ep.checkpoint.stored import Stored, StoredCheckpoint
from lightning_moe_ep.experts import NoExpertsError, SpreadExperts, find_experts, mark_spread, plain_class


@dataclass(frozen=True)
class Origin:
    """What transformers needs to build a model."""

    prefix: str
    """Before the names of its parameters in the checkpoint."""

    class_name: str
    """Empty: the class that a causal language model of this configuration has."""

    config: PreTrainedConfig

    @property
    def kind(self) -> type[PreTrainedModel] | None:
        """The class; None: that which a causal language model has.

        Raises:
            ValueError: transformers has no such class.
        """
        kind = getattr(transformers, self.class_name, None) if self.class_name else None
        if self.class_name and kind is None:
            raise ValueError(
                f"transformers {transformers.__version__} has no class {self.class_name}, which the checkpoint's"
                " model is of; for a model of remote code or of your own, load the checkpoint into its module"
                " (load_from_checkpoint) and call save_pretrained"
            )
        return kind

    def build(self) -> PreTrainedModel:
        """The plain model, on the meta device.

        Raises:
            ValueError: transformers has no such class.
        """
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config) if self.kind is None else self.kind(self.config)


def plain_of(model: PreTrainedModel) -> PreTrainedModel:
    """The plain model of a parallel one, on the meta device."""
    with torch.device("meta"):
        plain: PreTrainedModel = plain_class(model)(copy.deepcopy(model.config))
    plain.generation_config = model.generation_config
    return plain


def origin_of(checkpoint: StoredCheckpoint, *, config: Path | None = None, model: str | None = None) -> Origin:
    """How to build the model of transformers in a checkpoint.

    Args:
        checkpoint: its record says it, if our strategy has saved it.
        config: instead, a folder or file with a configuration.
        model: the model's path in the LightningModule; needed where there are several, or `config` is given and the
            names in the checkpoint do not tell.

    Raises:
        ValueError: nothing says what it is, or there are several.
    """
    known: Mapping[str, Any] = checkpoint.record.get("models", {})
    if model is not None and known and model not in known:
        raise ValueError(f"the checkpoint has no model at {model!r}; it has {list(known)}")
    if not known and config is None:
        raise ValueError(
            f"{checkpoint.path} does not say which model of transformers it has: MoEEPStrategy notes that where the"
            " module holds one. Give its config.json, or the folder that has it, as config"
        )
    paths = [model] if model is not None else list(known)
    if len(paths) > 1:
        raise ValueError(f"the checkpoint has several models; give the path of one of them as model: {paths}")
    described = known.get(paths[0], {}) if paths else {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        if config is None:
            file.write_text(json.dumps(described["config"]))
        else:
            shutil.copyfile(config / "config.json" if config.is_dir() else config, file)
        loaded = AutoConfig.from_pretrained(folder)
    class_name = described.get("class") or (loaded.architectures or [""])[0]
    prefix = f"{paths[0]}." if paths and paths[0] else "" if paths else _guess_prefix(checkpoint)
    return Origin(prefix, class_name, loaded)


def _guess_prefix(checkpoint: StoredCheckpoint) -> str:
    """What all names of the weights begin with: the attribute of the LightningModule, if it has but one."""
    first = {name.split(".")[0] for name in checkpoint.weights}
    if len(first) != 1:
        raise ValueError(
            f"which of {sorted(first)} in {checkpoint.path} is the model? Give its path in the LightningModule as model"
        )
    return f"{first.pop()}."


def _spread(model: nn.Module) -> None:
    """Give a plain model, on the meta device, the parameters that it has once it is parallel, at ep 1."""
    try:
        experts = find_experts(model)
    except NoExpertsError:
        return
    for found in experts:
        number = found.num_experts
        found.adapter.prepare()
        spread = SpreadExperts(found.name, found.adapter, number, 1, 0, MixedPrecisionPolicy(), by_fsdp=True)
        mark_spread(found.module, spread)


def plain_weights(checkpoint: StoredCheckpoint, origin: Origin, plain: PreTrainedModel) -> dict[str, Stored]:
    """The weights of a model of transformers, by the plain model's names.

    Args:
        checkpoint: of either form.
        origin: of the model.
        plain: the model.

    Raises:
        ValueError: the checkpoint lacks some of the model's weights, has others, or other shapes; or it has adapters.
    """
    weights = _of(origin, checkpoint.tensors)
    check_no_adapters(weights, source=str(checkpoint.path))
    if checkpoint.is_folder and "pieces" in checkpoint.record:
        weights = _of(origin, to_plain(checkpoint.pieces, checkpoint.tensors))
    elif checkpoint.is_folder:
        parallel = origin.build()
        _spread(parallel)
        weights = to_plain(describe_pieces(parallel), weights)
    check_weights(weights, dict(plain.state_dict()), source=str(checkpoint.path))
    return weights


def plain_tensors(checkpoint: StoredCheckpoint, origin: Origin) -> dict[str, Stored]:
    """The same for a checkpoint that our strategy saved, whatever there should be.

    Raises:
        NotImplementedError: the plain model's tensors cannot be found without the model.
    """
    weights = _of(origin, checkpoint.tensors)
    if not checkpoint.is_folder:
        return weights
    pieces = {name: described for name, described in checkpoint.pieces.items() if name.startswith(origin.prefix)}
    return _of(origin, to_plain(pieces, checkpoint.tensors))


def _of(origin: Origin, weights: Mapping[str, Stored]) -> dict[str, Stored]:
    return {n.removeprefix(origin.prefix): value for n, value in weights.items() if n.startswith(origin.prefix)}


def check_no_adapters(names: Iterable[str], *, source: str) -> None:
    """
    Raises:
        ValueError: there are adapters of PEFT among the weights.
    """
    adapted = next((name for name in names if ".lora_" in name or ".base_layer." in name), None)
    if adapted is not None:
        raise ValueError(
            f"{source} has adapters of PEFT ({adapted}); in a run (one that is restored from the checkpoint), call"
            " save_adapter(model, folder) for the adapters, or merged_model(model) and save_pretrained for the whole"
        )


def check_weights(weights: Mapping[str, Stored], expected: Mapping[str, Tensor], *, source: str) -> None:
    """Names and shapes, all at once.

    Raises:
        ValueError: they differ.
    """
    problems = [f"{name} is missing" for name in expected if name not in weights]
    problems += [f"{name} is not the model's" for name in weights if name not in expected]
    problems += [
        f"{name} is {list(weights[name].shape)}, the model's is {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"the weights of {source} are not those of its configuration: {'; '.join(problems[:8])}{more}")
