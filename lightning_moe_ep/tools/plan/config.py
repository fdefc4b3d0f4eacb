"""What the configuration of a run says that a plan needs: the YAML of `fit`, read without starting anything.

Of what it describes only the module is made, on the meta device, and that where it is asked for: no Trainer, no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import torch
from jsonargparse import Namespace
from torch import nn

from lightning_moe_ep.precision import SUPPORTED
from lightning_moe_ep.tools.reading import FitArguments

_PRECISIONS = {None: "32-true", "32": "32-true", "bf16": "bf16-mixed"}
"""What Lightning calls those of `SUPPORTED` too."""


@dataclass(frozen=True)
class Run:
    """What a plan is about, beside the machine."""

    build: Callable[[], nn.Module]
    """Makes the module with its model, on the meta device; can be sent to another process."""

    sequences: int | None
    """Of a micro-batch on one rank; None: not known."""

    length: int | None
    """Tokens of each."""

    precision: str = "32-true"
    micro_batches: int = 1
    """Accumulated before the optimizer steps."""

    device_type: str = "cuda"
    """Where it computes: "cpu" only if its accelerator says so."""

    strategy: dict[str, Any] | None = None
    """The arguments of `MoEEPStrategy`, if the run has it."""


def read_run(arguments: Sequence[str]) -> Run:
    """The run that these arguments of `fit` describe.

    Args:
        arguments: as they are typed after `fit`.

    Raises:
        SystemExit: what jsonargparse does where they are wrong, after it has said why.
        ValueError: the precision is not supported.
    """
    config = FitArguments(arguments).of_fit
    trainer, data = config.trainer, config.get("data")
    precision = trainer.precision if trainer.precision is None else str(trainer.precision)
    precision = _PRECISIONS.get(precision, precision)
    if precision not in SUPPORTED:
        raise ValueError(f"precision={precision!r} is not supported with expert parallelism; use one of {SUPPORTED}")
    of_data = data.get("init_args", Namespace()) if data is not None else Namespace()
    return Run(
        build=partial(build_module, tuple(arguments)),
        sequences=of_data.get("batch_size"),
        length=of_data.get("block_size"),
        precision=precision,
        micro_batches=trainer.accumulate_grad_batches,
        device_type="cpu" if trainer.accelerator == "cpu" else "cuda",
        strategy=_strategy(trainer.strategy),
    )


def build_module(arguments: Sequence[str]) -> L.LightningModule:
    """The module of a run with its model, on the meta device.

    Raises:
        ValueError: its code makes weights for real, which `from_pretrained` does.
    """
    given = FitArguments(arguments)
    with torch.device("meta"):
        module = given.make_module()
    return configured(module)


def configured(module: L.LightningModule) -> L.LightningModule:
    """Have a module build its model on the meta device, as a strategy with `init_on_meta` would.

    Raises:
        ValueError: its code makes weights for real, which `from_pretrained` does.
    """
    # What CausalLMModule, and others that leave the weights to the strategy, ask of their Trainer.
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(materializes_meta=True), datamodule=None)
    try:
        with torch.device("meta"):
            module.configure_model()
    except RuntimeError as error:
        raise ValueError(
            f"{type(module).__name__}.configure_model cannot build its model without memory ({error}); give"
            " build_pretrained(folder) in place of from_pretrained(folder)"
        ) from error
    finally:
        module._trainer = None
    return module


def _strategy(given: Any) -> dict[str, Any] | None:
    """The arguments of our strategy, from how it is written in a configuration."""
    if isinstance(given, str):
        name, _, ep = given.partition("moe_ep")
        return None if name or not given else {"ep": int(ep.lstrip("_")) if ep else "auto"}
    path = given.get("class_path", "") if isinstance(given, Namespace) else ""
    return dict(given.get("init_args", {})) if path.endswith("MoEEPStrategy") else None
