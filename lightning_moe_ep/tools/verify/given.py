"""A run as its user describes it, and fresh modules, strategies and Trainer options of it.

What is taken from a run: model, data, layout, optimizer, clipping. What is left out is what only watches, and what a
short fp32 step has no use for; `options_of` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry

from lightning_moe_ep.callbacks import ExpertGradientCallback
from lightning_moe_ep.kernels import without_kernels_for_bf16
from lightning_moe_ep.strategy import MoEEPStrategy

STEPS = 2
"""Optimizer steps that are compared: one, and one more after a resume."""


@dataclass(frozen=True)
class Made:
    """One set of what a fit needs; for one fit only."""

    module: L.LightningModule
    datamodule: L.LightningDataModule | None
    strategy: MoEEPStrategy
    options: dict[str, Any]
    """Of the Trainer, but for the strategy."""

    changes: list[str]
    """What of them is not the run's own, a line each."""


@dataclass(frozen=True)
class Given:
    """The run that is asked about."""

    make: Callable[[], Made]
    """Makes everything anew; the same on every rank."""

    layers: int | None = None
    """Blocks to keep of each sequence; None: one of each kind."""

    weights_only: bool | None = None
    """As `fit` is told, for the checkpoint."""

    changes: list[str] = field(default_factory=list)
    """What was changed of the configuration already, a line each."""


def strategy_of(strategy: object) -> MoEEPStrategy:
    """The strategy of a Trainer's option, which may be a name.

    Raises:
        ValueError: it is another.
    """
    if isinstance(strategy, str) and strategy in StrategyRegistry.available_strategies():
        strategy = StrategyRegistry.get(strategy)
    if not isinstance(strategy, MoEEPStrategy):
        named = repr(strategy) if isinstance(strategy, str) else type(strategy).__name__
        raise ValueError(
            f"trainer.strategy is {named}; verify is for runs with MoEEPStrategy: give"
            " --trainer.strategy lightning_moe_ep.MoEEPStrategy --trainer.strategy.ep N"
        )
    return strategy


def keep_fp32_kernels(strategy: MoEEPStrategy) -> list[str]:
    """Leave out the kernels that do not compute in fp32, and say so, in lines."""
    kept, left_out = without_kernels_for_bf16(strategy.parallelize_options["kernels"])
    strategy.parallelize_options["kernels"] = kept
    return [f"left out of kernels, as they take no fp32: {', '.join(left_out)}"] if left_out else []


def options_of(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The Trainer's options for the steps that are compared, from those of the run, and what was changed, in lines."""
    changes = []
    callbacks = options.get("callbacks") or []
    callbacks = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    kept = [callback for callback in callbacks if isinstance(callback, ExpertGradientCallback)]
    if left_out := [type(callback).__name__ for callback in callbacks if callback not in kept]:
        changes.append(f"left out: {', '.join(left_out)}")
    plugins = options.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
    precisions = [plugin for plugin in plugins if isinstance(plugin, Precision)]
    precision = options.get("precision") or (type(precisions[0]).__name__ if precisions else "32-true")
    if str(precision) not in ("32-true", "32"):
        changes.append(f"fp32 in place of precision={precision}")
    accumulate = min(options.get("accumulate_grad_batches") or 1, 2)
    if accumulate != (options.get("accumulate_grad_batches") or 1):
        changes.append(f"{accumulate} micro-batches accumulated, not {options['accumulate_grad_batches']}")
    max_steps = -1 if options.get("max_steps") is None else options["max_steps"]
    made = {
        **options,
        "callbacks": kept,
        "plugins": [plugin for plugin in plugins if plugin not in precisions],
        "precision": "32-true",
        "accumulate_grad_batches": accumulate,
        "max_steps": max_steps if max_steps == -1 else max(max_steps, STEPS),
        "gradient_clip_val": 1.0,  # until the norm is known
        "min_steps": None,
        "min_epochs": None,
        "max_time": None,
        "logger": DummyLogger(),  # a module may ask for its experiment
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "fast_dev_run": False,
        "profiler": None,
    }
    made.pop("strategy", None)
    return made, changes


def prepare(made: Made, edit: Callable[[L.LightningModule], None]) -> None:
    """Have `edit` change the module's model: at once if there is one, else when `configure_model` has made it."""
    module = made.module
    if next(module.parameters(), None) is not None:
        edit(module)
        return
    configure = module.configure_model

    def configure_and_edit() -> None:
        before = next(module.parameters(), None)
        configure()
        if before is None:
            edit(module)

    module.configure_model = configure_and_edit
