"""From the tensors of a plain model of transformers to those that its family has on disk.

transformers' own conversions decide on names, shapes and values. They run on the meta device once, which gives the
plan; then on the values, group by group of tensors that belong together, and where experts are stacked in memory a few
experts at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from lightning_moe_ep.checkpoint.stored import Stored
from lightning_moe_ep.experts import NoExpertsError, find_experts
from lightning_moe_ep.trees import tensors_of


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together."""

    sources: dict[str, Tensor]
    """Of the plain model, on the meta device."""

    targets: dict[str, Tensor]
    """On disk, on the meta device."""

    rows: int
    """How many rows (experts) the sources have, if they can be converted a few rows at a time; else 0."""

    apart: bool = False
    """Whether each row becomes tensors of its own, rather than a row of the targets."""

    @property
    def is_as_it_is(self) -> bool:
        """Whether nothing but a name is converted."""
        return len(self.sources) == len(self.targets) == 1 and next(iter(self.sources.values())) is next(
            iter(self.targets.values())
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.sources.values())


@dataclass(frozen=True)
class Rows:
    """Values for a tensor on disk."""

    name: str
    first: int
    """The first row that they are for."""
    values: Tensor


def plan_groups(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> list[Group]:
    """What becomes of a plain model's tensors on disk, in the order there.

    Args:
        model: on the meta device.
        dtypes: in which its tensors come.
    """
    state = dict(model.state_dict())
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    names = list(remove_tied_weights_from_state_dict(dict(state), model))
    sources = {name: torch.empty(state[name].shape, dtype=dtypes[name], device="meta") for name in names}
    with _noted_conversions() as noted:
        targets = revert_weight_conversion(model, dict(sources))
    names_of = {id(tensor): name for name, tensor in sources.items()}
    taken = {id(made): takes for takes, makes in noted for made in makes}
    groups: dict[tuple[str, ...], list[str]] = {}
    for target, tensor in targets.items():
        of = tuple(names_of[id(source)] for source in taken.get(id(tensor), [tensor]))
        groups.setdefault(of, []).append(target)
    stacked = _stacked(model)
    found = []
    for of, made in groups.items():
        group = Group({name: sources[name] for name in of}, {name: targets[name] for name in made}, 0)
        rows = {tensor.shape[0] if name in stacked else 0 for name, tensor in group.sources.items()}
        if not group.is_as_it_is and len(rows) == 1 and (count := rows.pop()) > 1:
            group = _by_rows(model, group, count)
        found.append(group)
    return found


def _stacked(model: nn.Module) -> set[str]:
    """The parameters with a dimension for experts of its own."""
    try:
        experts = find_experts(model)
    except (NoExpertsError, NotImplementedError):  # of a kind that is not stacked
        return set()
    return {
        f"{found.name}.{name}" if found.name else name
        for found in experts
        for name in found.adapter.parameters
        if found.module.get_parameter(name).ndim > 2 or len(found.module.get_parameter(name)) == found.num_experts
    }


@contextmanager
def _noted_conversions() -> Iterator[list[tuple[list[Tensor], list[Tensor]]]]:
    """Inside, for each conversion of tensors that belong together: what it takes, and what it makes.

    transformers 5.24 does not tell, and some need all of theirs at a time though each result is made of one.
    """
    noted = []
    convert = WeightConverter.convert

    def noting(self: WeightConverter, *args: Any, **kwargs: Any) -> dict[str, Any]:
        takes = [tensor for tensors in self.collected_tensors.values() for tensor in tensors]
        made = convert(self, *args, **kwargs)
        noted.append((takes, tensors_of(list(made.values()))))
        return made

    WeightConverter.convert = noting
    try:
        yield noted
    finally:
        WeightConverter.convert = convert


def _by_rows(model: PreTrainedModel, group: Group, rows: int) -> Group:
    """Have the group converted by rows, if each becomes a row of the targets, or tensors of its own."""
    one = _convert(model, group, {name: tensor[:1] for name, tensor in group.sources.items()})
    names = list(group.targets)
    if list(one) == names:
        kept = all(group.targets[name].shape == (rows, *tensor.shape[1:]) for name, tensor in one.items())
        return replace(group, rows=rows) if kept else group
    of_kinds = [names[start : start + rows] for start in range(0, len(names), rows)]
    apart = len(of_kinds) == len(one) and all(
        # Numbers may start anew for each kind, or go on.
        [_apart(of_kind[0], name) for name in of_kind] == list(range(rows))
        and all(group.targets[name].shape == tensor.shape for name in of_kind)
        for of_kind, tensor in zip(of_kinds, one.values(), strict=True)
    )
    return replace(group, rows=rows, apart=True) if apart else group


def _apart(name: str, other: str) -> int | None:
    """By how much the one number differs in which two names differ; None if they differ in more."""
    parts, others = re.split(r"(\d+)", name), re.split(r"(\d+)", other)
    if len(parts) != len(others):
        return None
    different = [(a, b) for a, b in zip(parts, others, strict=True) if a != b]
    if not different:
        return 0
    first, second = different[0]
    return int(second) - int(first) if len(different) == 1 and first.isdigit() and second.isdigit() else None


def convert(
    model: PreTrainedModel, group: Group, read: Callable[[str, int, int], Tensor], *, max_bytes: int
) -> Iterator[Rows]:
    """The group's values on disk, piece by piece.

    Args:
        model: the plain model, on the meta device.
        group: of its plan.
        read: gives rows of a source, in the dtype that was planned.
        max_bytes: how much may be held at a time. One row is always read, and what cannot be converted in rows whole.
    """
    if group.is_as_it_is:
        ((source, tensor),) = group.sources.items()
        (target,) = group.targets
        stored = Stored(tensor.shape, tensor.dtype, partial(read, source))
        for start, stop in stored.spans(max_bytes // 2):  # the read may need as much once more, for another dtype
            yield Rows(target, start, stored.read(start, stop))
        return
    if not group.rows:
        values = {name: read(name, 0, len(tensor) if tensor.ndim else 1) for name, tensor in group.sources.items()}
        for name, value in _convert(model, group, values).items():
            yield Rows(name, 0, value)
        return
    # Sources, a conversion's steps and its result.
    step = max(1, min(group.rows, max_bytes // 4 // max(1, group.nbytes // group.rows)))
    names = list(group.targets)
    for start in range(0, group.rows, step):
        count = min(step, group.rows - start)
        made = _convert(model, group, {name: read(name, start, start + count) for name in group.sources})
        for position, name in enumerate(list(made)):
            kind, row = divmod(position, count)
            target, first = (names[kind * group.rows + start + row], 0) if group.apart else (name, start)
            yield Rows(target, first, made.pop(name))


def _convert(model: PreTrainedModel, group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What transformers makes of the group's tensors, or of some rows of each."""
    with _shaped(model, tensors):
        return revert_weight_conversion(model, dict(tensors))


@contextmanager
def _shaped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has parameters of these shapes: conversions compare a tensor's shape with the parameter's."""
    before = {}
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition(".")
        parameters = model.get_submodule(owner)._parameters
        if parameters.get(key) is not None and parameters[key].shape != tensor.shape:
            before[name] = (parameters, key, parameters[key])
            parameters[key] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
    try:
        yield
    finally:
        for parameters, key, parameter in before.values():
            parameters[key] = parameter
