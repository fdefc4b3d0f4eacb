"""Training checkpoints: what a Trainer resumes from, and the whole state that one file holds, at any layout.

Two forms. A folder, written by all ranks through torch's distributed checkpoint (DCP), with Lightning's `meta.pt`
beside it; or one file with whole tensors, in the form that Lightning writes for the plain model on one device. Either
is read at any layout. It is the one place that imports Lightning's private checkpoint functions.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# Private; read at lightning 2.6.6. A test fails when they move.
from lightning.fabric.strategies.model_parallel import (
    _is_full_checkpoint,
    _is_sharded_checkpoint,
    _load_checkpoint,
)
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_ep.checkpoint.names import model_from_file, optimizer_from_file, optimizer_to_file
from lightning_moe_ep.checkpoint.optimizers import check_stepped, load_optimizer
from lightning_moe_ep.checkpoint.record import KEY, NEVER_STEPPED
from lightning_moe_ep.checkpoint.recovery import look_up
from lightning_moe_ep.checkpoint.stored import CURRENT
from lightning_moe_ep.experts import to_plain
from lightning_moe_ep.shards import cut, gather


def load(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    training: bool = False,
    averages: Callable[[], Mapping[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Fill a sharded model and its optimizers from a checkpoint of either form; every rank calls this.

    Args:
        path: a folder or a file, seen by every rank.
        module: the model, sharded at any layout.
        optimizers: those whose state is wanted; none when not fitting.
        strict: whether the names must match exactly.
        weights_only: as in `torch.load`.
        training: whether the model goes on being trained: where the checkpoint has averages, the model is filled with
            the weights that they are of.
        averages: if these averages are wanted, too: tensors to fill, by their names in the state dict, sharded.

    Returns:
        The rest of the checkpoint.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: `path` is no checkpoint, or not a complete one.
        KeyError: optimizer state is wanted, but the checkpoint has none.
    """
    # What hyperparameters often hold. Lightning has no way to ask a sharding strategy for more than weights_only.
    with torch.serialization.safe_globals([type(Path())]):
        return _load(path, module, optimizers, strict, weights_only, training, averages)


def _load(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    strict: bool,
    weights_only: bool | None,
    training: bool,
    averages: Callable[[], Mapping[str, Tensor]] | None,
) -> dict[str, Any]:
    look_up(path)
    if _is_sharded_checkpoint(path):
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        missing = [n for n in range(len(optimizers)) if not any(key.startswith(f"optimizer_{n}.") for key in saved)]
        if missing:
            raise _no_optimizer_state(path)
        has_averages = any(key.startswith(f"{CURRENT}.") for key in saved)
        key = CURRENT if training and has_averages else "state_dict"
        try:
            rest = _load_checkpoint(path=path, state={key: module}, strict=strict, weights_only=weights_only)
            if has_averages and averages is not None:
                dcp.load({"state_dict": dict(averages())}, storage_reader=FileSystemReader(path))
            for number, optimizer in enumerate(optimizers):
                load_optimizer(path, number, module, optimizer, _never_stepped(rest, number))
        except CheckpointException as error:  # no Exception; it has those of all ranks
            rank, (reason, _) = next(iter(sorted(error.failures.items())))
            raise ValueError(f"{path} cannot be read: {reason} (rank {rank})") from error
        return rest
    if not _is_full_checkpoint(path) or not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is not a checkpoint: neither a folder with {_METADATA_FILENAME} and shards, nor a file that"
            " torch.save wrote"
        )
    checkpoint = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    if "state_dict" not in checkpoint:
        raise ValueError(f"{path} is not a Trainer's checkpoint: it has no state_dict, but {list(checkpoint)[:5]}")
    weights, current = checkpoint.pop("state_dict"), checkpoint.pop(CURRENT, None)
    _load_full_model_state(module, current if training and current else weights, strict=strict)
    if current and averages is not None:
        _load_full_averages(module, weights, averages(), strict=strict)
    states = checkpoint.pop("optimizer_states", [])
    if len(states) < len(optimizers):
        raise _no_optimizer_state(path)
    for number, (optimizer, optimizer_state) in enumerate(zip(optimizers, states, strict=False)):
        _load_full_optimizer_state(module, optimizer, optimizer_state)
        if KEY in checkpoint and optimizer.state:
            check_stepped(path, module, optimizer, _never_stepped(checkpoint, number))
    return checkpoint


def _never_stepped(rest: Mapping[str, Any], number: int) -> list[str]:
    """The parameters of which an optimizer had no state when it was saved, by the record."""
    return rest.get(KEY, {}).get(NEVER_STEPPED, {}).get(number, [])


def _no_optimizer_state(path: Path) -> KeyError:
    return KeyError(
        f"{path} has no state for the optimizer(s): it was saved with save_weights_only=True. Train on from its weights"
        " by loading them into the module instead of passing it as ckpt_path"
    )


def full_model_state(module: nn.Module, instead: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Any]:
    """The plain model's whole state dict on the CPU of rank 0, `{}` on the others; every rank calls this.

    Args:
        module: the parallel model.
        instead: tensors, sharded as the model's, that take the place of those of the same name.
    """
    state = module.state_dict()
    state = _gathered({name: instead.get(name, value) for name, value in state.items()})
    return to_plain(module, state)


def full_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The whole optimizer state on the CPU of rank 0, `{}` on the others; every rank calls this.

    It is what the optimizer of the plain model would save.
    """
    saved = optimizer.state_dict()
    # Sorted, so that all ranks gather in one order.
    state = {key: _gathered(saved["state"][key]) for key in sorted(saved["state"])}
    if dist.get_rank() != 0:
        return {}
    return optimizer_to_file(module, optimizer, {"state": state, "param_groups": saved["param_groups"]})


def _gathered(state: Mapping[str, Any]) -> dict[str, Any]:
    whole = {key: gather(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    return whole if dist.get_rank() == 0 else {}


def _load_full_model_state(module: nn.Module, full: Mapping[str, Any], *, strict: bool) -> None:
    targets = module.state_dict()
    state = model_from_file(module, full, strict=strict, fit=lambda name, value: _fit(targets.get(name), value))
    module.load_state_dict(state, strict=strict)


def _load_full_averages(
    module: nn.Module, full: Mapping[str, Any], averages: Mapping[str, Tensor], *, strict: bool
) -> None:
    state = model_from_file(module, full, strict=strict, fit=lambda name, value: _fit(averages.get(name), value))
    for name, average in averages.items():
        if name in state:
            average.copy_(state[name])


def _load_full_optimizer_state(module: nn.Module, optimizer: Optimizer, full: Mapping[str, Any]) -> None:
    optimizer.load_state_dict(optimizer_from_file(module, optimizer, full, fit=_fit))


def _fit(target: Any, value: Any) -> Any:
    """Cut a whole tensor as the target is; what has another shape (an optimizer's step count) stays as it is."""
    if isinstance(target, DTensor) and isinstance(value, Tensor) and value.shape == target.shape:
        return cut(value, target)
    return value
