"""Optimizer state from the folder form; what is not there is an error, never a zero.

A parameter that no step has reached yet (a vision tower of a model that has seen texts only) has no state. A checkpoint
lists these, so that a missing state can be told from a lost one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer


def never_stepped(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the parameters that the optimizer trains, but has no state of."""
    return [name for name, parameter in _trained(module, optimizer) if parameter not in optimizer.state]


def check_stepped(path: Path, module: nn.Module, optimizer: Optimizer, known: Collection[str]) -> None:
    """See that an optimizer, as it was loaded, has a state of every parameter that it trains.

    Args:
        path: of the checkpoint.
        module: the model.
        optimizer: of the model.
        known: the parameters of which the checkpoint says that it has none.

    Raises:
        KeyError: it has none of others.
    """
    if lost := [name for name in never_stepped(module, optimizer) if name not in known]:
        raise _lost(path, lost)


def load_optimizer(path: Path, number: int, module: nn.Module, optimizer: Optimizer, known: Collection[str]) -> None:
    """Fill an optimizer from a folder; every rank calls this.

    An option of a parameter group that the folder lacks (`initial_lr` of a scheduler that was added since, a `name`)
    stays as the optimizer has it.

    Args:
        path: the folder.
        number: of the optimizer.
        module: the model, sharded.
        optimizer: of the model.
        known: as for `check_stepped`.

    Raises:
        KeyError: the folder lacks the state of a parameter, or a part of it; on every rank.
    """
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    wanted = get_optimizer_state_dict(module, optimizer)
    state = wanted["state"]
    lost, absent = [], []
    for name, values in state.items():
        missing = [key for key in values if f"optimizer_{number}.state.{name}.{key}" not in saved]
        if missing and (name not in known or len(missing) < len(values)):
            lost.append(name)
        elif missing:
            absent.append(name)
    if lost:
        raise _lost(path, lost)
    for name in absent:
        del state[name]
    own = [
        {key: group.pop(key) for key in list(group) if not _has(saved, f"optimizer_{number}.param_groups.{place}", key)}
        for place, group in enumerate(wanted["param_groups"])
    ]
    dcp.load({f"optimizer_{number}": wanted}, storage_reader=reader)
    for group, kept in zip(wanted["param_groups"], own, strict=True):
        group.update(kept)
    set_optimizer_state_dict(module, optimizer, wanted, options=StateDictOptions(strict=not absent))


def _has(saved: Collection[str], group: str, key: str) -> bool:
    """Whether a key of a parameter group is to be read: `params` is in any case, as without it the group is lost."""
    name = f"{group}.{key}"
    return key == "params" or name in saved or any(one.startswith(f"{name}.") for one in saved)


def _lost(path: Path, names: Sequence[str]) -> KeyError:
    return KeyError(
        f"{path} lacks optimizer state of {len(names)} parameter(s), {names[0]} first: they were not trained when it"
        " was saved, or it is damaged. Train the same parameters, or start a new training from its weights"
        " (CausalLMModule(pretrained=...), load_pretrained)"
    )


def _trained(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) in names:
                yield names[id(parameter)], parameter
