"""A run's configuration, as `fit` takes it, and the sizes of its model if they are to be smaller."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from jsonargparse import Namespace
from transformers import AutoConfig

from lightning_moe_ep.causal_lm import CausalLMModule
from lightning_moe_ep.checkpoint import pretrained_config
from lightning_moe_ep.tools.reading import FitArguments
from lightning_moe_ep.tools.verify.given import Given, Made, keep_fp32_kernels, options_of, strategy_of

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""How configurations of transformers call E."""

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k", "moe_topk")
"""And K."""

ROUND = 16
"""What widths are multiples of."""


def read(
    arguments: Sequence[str], *, layers: int | None = None, experts: int | None = None, width: int | None = None
) -> Given:
    """The run that `fit` would make of these arguments.

    Args:
        arguments: of `fit`, without its name.
        layers: blocks to keep of each sequence.
        experts: of each layer, instead of as many as there are.
        width: the hidden size, instead of the model's; inner sizes shrink with it.

    Raises:
        ValueError: a size does not fit; or there is no configuration that it could be written into.
        SystemExit: the parser has said what is wrong.
    """
    for name, value in (("layers", layers), ("experts", experts), ("width", width)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}, but must be at least 1")
    reader = FitArguments(arguments)
    config = reader.of_fit
    changes = _shrink(config.model, experts, width)
    if config.get("ckpt_path"):
        changes.append(f"ckpt_path={config.ckpt_path} is not read: the weights are new")

    def make() -> Made:
        if "seed_everything" in config and config.seed_everything is not False:
            seed = None if config.seed_everything is True else config.seed_everything  # True: whichever
            L.seed_everything(seed, workers=True, verbose=False)
        module, datamodule, options = reader.make()
        strategy = strategy_of(options.get("strategy"))
        run, changes = options_of(options)
        return Made(module, datamodule, strategy, run, [*changes, *keep_fp32_kernels(strategy)])

    return Given(make, layers=layers, weights_only=config.get("weights_only"), changes=changes)


def _shrink(model: Namespace, experts: int | None, width: int | None) -> list[str]:
    """Write smaller sizes into a `CausalLMModule`'s arguments."""
    module, _, name = model.class_path.rpartition(".")
    is_causal_lm = issubclass(getattr(importlib.import_module(module), name), CausalLMModule)
    changes = []
    arguments = model.get("init_args") or Namespace()
    if is_causal_lm and arguments.get("aux_loss") == "global":
        arguments.aux_loss = "local"
        changes.append("aux_loss is local, not global: ranks would need each other's tokens in one process, too")
    if experts is None and width is None:
        return changes
    if not is_causal_lm:
        option = "--experts" if experts is not None else "--width"
        raise ValueError(
            f"{option} is for CausalLMModule, whose sizes are in a configuration; give {name} smaller sizes by its own"
            " options: --model.NAME VALUE"
        )
    config = arguments.get("config")
    if config is None:
        source = Path(arguments.pretrained)
        config = json.loads(pretrained_config(source)[0].to_json_string(use_diff=False))
        arguments.pretrained = None
        changes.append(f"{source} is not read: the weights are new")
    arguments.config, told = smaller(dict(config), experts, width)
    return changes + told


def smaller(config: dict[str, Any], experts: int | None, width: int | None) -> tuple[dict[str, Any], list[str]]:
    """A configuration of transformers with fewer experts, or a smaller hidden size, and what was changed.

    Raises:
        ValueError: it has no such size, or that is smaller already.
    """
    whole = AutoConfig.for_model(**config)
    config, told = dict(config), []
    if experts is not None:
        key = _experts_key(config, whole)
        _check_smaller("experts", experts, key, getattr(whole, key))
        told.append(f"{key}={experts}, not {getattr(whole, key)}")
        config[key] = experts
        for chosen in CHOSEN:
            if isinstance(getattr(whole, chosen, None), int) and getattr(whole, chosen) > experts:
                told.append(f"{chosen}={experts}, not {getattr(whole, chosen)}")
                config[chosen] = experts
        if (getattr(whole, "n_group", None) or 1) > 1:
            config.update(n_group=1, topk_group=1)
            told.append("n_group=1")
    if width is not None:
        _check_smaller("width", width, "hidden_size", whole.hidden_size)
        for key in [key for key in vars(whole) if key == "hidden_size" or key.endswith("intermediate_size")]:
            size = getattr(whole, key)
            if isinstance(size, int):
                config[key] = width if key == "hidden_size" else _shrunk(size, width / whole.hidden_size)
                told.append(f"{key}={config[key]}, not {size}")
    return config, told


def _shrunk(size: int, ratio: float) -> int:
    return min(size, max(ROUND, round(size * ratio / ROUND) * ROUND))


def _experts_key(config: dict[str, Any], whole: Any) -> str:
    """The name of E: as it was given, as one may be another's other name."""
    known = [name for name in EXPERTS if isinstance(getattr(whole, name, None), int)]
    if not known:
        raise ValueError(
            f"the configuration of {whole.model_type} has no number of experts that is known: none of {list(EXPERTS)}"
        )
    return next((name for name in known if name in config), known[0])


def _check_smaller(option: str, value: int, key: str, size: int) -> None:
    if value > size:
        raise ValueError(f"--{option} {value} is more than the model's {key}={size}; give at most that")
