"""The weights that forked ranks have trained, in the plain module of the process that forked them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_moe_ep.initialization import materialize

MOST_BYTES = 4 * 2**30
"""Of weights that are brought back into a module that is not built yet: beyond, they are left in a checkpoint."""


def is_built(module: L.LightningModule) -> bool:
    """Whether there is nothing left to do for `configure_model`."""
    own = vars(module).get("configure_model")  # what a strategy puts there once it has run
    return (own is not None and own.__name__ != _refuse.__name__) or not is_overridden("configure_model", module)


def take_back(module: L.LightningModule, strategy: ModelParallelStrategy, file: Path, *, otherwise: Path) -> None:
    """Build the module if need be, and fill it; if it cannot be built and filled here, `leave` the weights.

    Args:
        module: plain; what it has built stays the same objects, with new values.
        strategy: with whose precision it is built.
        file: a Trainer's checkpoint of one file, which is used up.
        otherwise: a checkpoint with the same weights, or where one can be made.
    """
    before, tables = dict(vars(module)), {kind: dict(vars(module)[kind]) for kind in _TABLES}
    try:
        if not is_built(module):
            _build(module, strategy)
        fill(module, torch.load(file, map_location="cpu", mmap=True, weights_only=False)["state_dict"])
    except Exception as error:
        # What is there now has initial weights, and must not be taken for trained.
        vars(module).clear()
        vars(module).update({**before, **tables})
        reason = f"{type(error).__name__}: {error}"
        if not otherwise.exists():
            otherwise.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, otherwise)
            reason += " (it has weights only, to validate, test or predict with)"
        leave(module, otherwise, reason)
        return
    if is_overridden("configure_model", module):
        module.configure_model = lambda: None


_TABLES = ("_parameters", "_buffers", "_modules")


def leave(module: L.LightningModule, checkpoint: Path, reason: str) -> None:
    """Tell the user where the trained weights are, and have the module refuse to start over from initial ones.

    Args:
        module: not built.
        checkpoint: has the weights.
        reason: why they are not in the module.
    """
    rank_zero_warn(
        f"The trained weights are in {checkpoint}, not in the module of this process: {reason}. Give it as ckpt_path"
    )
    module.configure_model = _refuse(module, checkpoint)


def _refuse(module: L.LightningModule, checkpoint: Path) -> Any:
    def configure_model() -> None:
        if getattr(module.trainer.strategy, "given_checkpoint", None) is None:
            raise RuntimeError(
                f"this module was trained, but its weights are in {checkpoint}, not in this process; give"
                f" ckpt_path={str(checkpoint)!r}, or make a new module to start over"
            )
        type(module).configure_model(module)

    configure_model.__name__ = _refuse.__name__
    return configure_model


def _build(module: L.LightningModule, strategy: ModelParallelStrategy) -> None:
    """Run `configure_model` as the ranks do, but for a plain model."""
    parallelize = vars(type(strategy)).get("parallelize")
    if parallelize is not None:  # a module that calls it by itself
        strategy.parallelize = lambda *args, **options: None
    try:
        # The user's own random numbers go on as if nothing had been drawn.
        with (
            torch.random.fork_rng(devices=[]),
            strategy.tensor_init_context(),
            strategy.precision_plugin.module_init_context(),
        ):
            type(module).configure_model(module)
    finally:
        vars(strategy).pop("parallelize", None)


def fill(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a plain module the values of a state dict, in place where it has memory already.

    What is not in the state dict has to be frozen, and keeps its value.

    Raises:
        ValueError: names or shapes differ; the module is then as it was.
    """
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad and not p.is_meta}
    wanted = module.state_dict()
    unlike = [
        *(name for name in wanted if name not in state and name not in frozen),
        *(name for name in state if name not in wanted),
        *(name for name, value in state.items() if _shape(value) != _shape(wanted.get(name))),
    ]
    if unlike:
        raise ValueError(
            f"the module that configure_model builds here is not the one that was trained: {len(unlike)} name(s) or"
            f" shapes differ, {unlike[0]} first"
        )
    made: dict[int, Tensor] = {}
    for path, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                value = state.get(f"{path}.{key}" if path else key)
                if tensor is None or not isinstance(value, Tensor):
                    continue
                if tensor.is_meta:
                    memory = torch.empty_like(value)
                    if id(tensor) not in made:
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
                    table[key] = made[id(tensor)]
                elif tensor.dtype != value.dtype:
                    tensor.data = torch.empty_like(value, device=tensor.device)
    module.load_state_dict(state, strict=False)
    materialize(module, seed=0, device=torch.device("cpu"))  # buffers that are computed, not saved


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None
