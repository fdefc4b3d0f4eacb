"""From the user's model to one that is small, and that computes the same each time.

Of each sequence of blocks around experts one block of each kind stays. It works on the modules, so it is the same for a
model of transformers and for a user's own; on the meta device it costs nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from lightning_moe_ep.experts import find_experts
from lightning_moe_ep.gradients import is_replicated
from lightning_moe_ep.units import find_blocks

RANDOM = re.compile(r"dropout|drop_prob|drop_path|layerdrop|drop_rate|jitter")
"""Attributes that say how much noise there is."""


def cut(model: nn.Module, layers: int | None) -> list[str]:
    """Keep some blocks of each sequence with experts, at least one of each kind, in place.

    Args:
        model: a plain model.
        layers: how many blocks of each sequence; None: one of each kind.

    Returns:
        What was cut, in lines.

    Raises:
        ValueError: the module has parallelized its model itself.
        NoExpertsError: there is no experts module.
    """
    if any(not is_replicated(parameter) for parameter in model.parameters()):
        raise ValueError(
            "the module parallelizes its model itself, in configure_model; verify cuts the model before that: leave it"
            " to the strategy"
        )
    told = []
    for blocks in find_blocks(model, find_experts(model)):
        name, container = next(
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and blocks[0] in module.children()
        )
        if isinstance(container, nn.ModuleDict) or len(blocks) != len(container):
            told.append(f"{name}: all {len(container)} blocks are kept, as they may be called by name")
            continue
        config = _config_of(model, name, len(blocks))
        kinds = _kinds(blocks, config)
        kept = sorted({kinds.index(kind) for kind in kinds})
        others = [number for number in range(len(blocks)) if number not in kept]
        kept = sorted([*kept, *others[: max(0, (layers or 0) - len(kept))]])
        if len(kept) == len(blocks):
            continue
        told.append(f"{name}: {len(kept)} of {len(blocks)} blocks ({', '.join(map(str, kept))}) are kept")
        for number in reversed(range(len(blocks))):
            if number not in kept:
                del container[number]
        if config is not None:
            _cut_config(config, kept, len(blocks))
    return told


def quiet(model: nn.Module) -> list[str]:
    """Take the noise out of a model: dropout, stochastic depth, jitter of routers.

    Returns:
        What was set to zero, in lines.
    """
    silenced = set()
    for module in [*model.modules(), *{id(config): config for config in _configs(model)}.values()]:
        for key, value in vars(module).items():
            noise = RANDOM.search(key) or (key == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            if noise and isinstance(value, int | float) and not isinstance(value, bool) and value:
                setattr(module, key, 0.0)
                silenced.add(f"{type(module).__name__}.{key}")
    return [f"set to 0: {', '.join(sorted(silenced))}"] if silenced else []


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    found = [vars(module).get("config") for module in model.modules()]
    configs = [config for config in found if isinstance(config, PreTrainedConfig)]
    return [*configs, *(config.get_text_config() for config in configs)]


def _config_of(model: nn.Module, name: str, length: int) -> PreTrainedConfig | None:
    """The configuration, of the nearest module around, that says how many blocks there are."""
    path = name.split(".")
    for end in range(len(path) - 1, -1, -1):
        config = vars(model.get_submodule(".".join(path[:end]))).get("config")
        if isinstance(config, PreTrainedConfig) and getattr(config, "num_hidden_layers", None) == length:
            return config
    return None


def _cut_config(config: PreTrainedConfig, kept: Sequence[int], length: int) -> None:
    """What it says of each block has to be said of those that are left."""
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == length:
            setattr(config, key, type(value)(value[number] for number in kept))
    config.num_hidden_layers = len(kept)


def _kinds(blocks: Sequence[nn.Module], config: PreTrainedConfig | None) -> list[str]:
    """What tells the kind of each block: the classes and shapes in it, and the settings that it shares with others."""
    settings = [_settings(block) for block in blocks]
    if config is not None:
        for key, value in vars(config).items():
            if isinstance(value, list | tuple) and len(value) == len(blocks):
                for number, of_block in enumerate(settings):
                    of_block[f"config.{key}"] = value[number]
    values: dict[str, set[Any]] = defaultdict(set)
    for of_block in settings:
        for key, value in of_block.items():
            values[key].add(repr(value))
    # Numbers that all differ are the blocks' own numbers.
    ignored = {
        key
        for key, found in values.items()
        if len(blocks) > 2 and len(found) == len(blocks) and all(isinstance(s.get(key), int | float) for s in settings)
    }
    shapes = [
        [(name, type(module).__name__) for name, module in block.named_modules()]
        + [(name, str(list(parameter.shape)), parameter.requires_grad) for name, parameter in block.named_parameters()]
        for block in blocks
    ]
    return [
        repr((shape, sorted((key, repr(value)) for key, value in of_block.items() if key not in ignored)))
        for shape, of_block in zip(shapes, settings, strict=True)
    ]


def _settings(block: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if (value is None or isinstance(value, bool | int | float | str)) and not re.search(r"idx|layer_id|_id$", key)
    }
