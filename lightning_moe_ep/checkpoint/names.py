"""Between a file and memory, where experts are kept otherwise than in the plain model: a file has the plain names.

Weights and the optimizer's state go both ways through the `to_file` and `from_file` of the experts' adapters. What
comes in and goes out are whole tensors; only one experts module at a time is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe_ep.experts import ExpertsAdapter, converted_experts

State = dict[str, Any]
"""What an optimizer keeps of one parameter."""


@dataclass(frozen=True)
class Converted:
    """An experts module that the plain model has in other pieces, or by other names."""

    prefix: str
    """Before the names of its parameters."""

    adapter: ExpertsAdapter

    parameters: dict[str, nn.Parameter]
    """In memory."""

    file_shapes: dict[str, torch.Size]
    """What the plain model has in their place, in its order."""

    made_of: dict[str, list[str]]
    """Which of the parameters each of these is made of."""

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the parameters."""
        return {name: parameter.shape for name, parameter in self.parameters.items()}

    @property
    def goes_into(self) -> dict[str, list[str]]:
        """The inverse of `made_of`."""
        return {name: [piece for piece, of in self.made_of.items() if name in of] for name in self.parameters}


def converted_modules(model: nn.Module) -> list[Converted]:
    """Those of the experts modules of `model` whose adapter has a `to_file`."""
    found = []
    for prefix, module, adapter in converted_experts(model):
        parameters = dict(module.named_parameters())
        shapes, made_of = _pieces(adapter, parameters)
        found.append(Converted(prefix, adapter, parameters, shapes, made_of))
    return found


def _pieces(
    adapter: ExpertsAdapter, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, torch.Size], dict[str, list[str]]]:
    """What `to_file` makes of the parameters: the shape of each piece, and the parameters that are in it.

    It runs on the meta device, and autograd tells what a piece was made of.
    """
    sources = {name: torch.empty(p.shape, device="meta", requires_grad=True) for name, p in parameters.items()}
    with torch.enable_grad():
        pieces = adapter.to_file(dict(sources))
        made_of = {}
        for name, piece in pieces.items():
            grads = torch.autograd.grad(piece.sum(), list(sources.values()), retain_graph=True, allow_unused=True)
            made_of[name] = [source for source, grad in zip(sources, grads, strict=True) if grad is not None]
    return {name: piece.shape for name, piece in pieces.items()}, made_of


# Weights.


def model_from_file(
    model: nn.Module, full: Mapping[str, Any], *, strict: bool, fit: Callable[[str, Any], Any]
) -> dict[str, Any]:
    """From the state dict of the plain model to one that `model` loads.

    Args:
        model: has its experts spread.
        full: the plain model's.
        strict: whether the names must match exactly.
        fit: from a name in memory and a whole value to what this rank keeps of it; called as soon as it is made.

    Raises:
        RuntimeError: names or shapes do not match, by the plain model's names; or, also if not `strict`, a file has
            some of the pieces of an experts module only.
    """
    converted = converted_modules(model)
    _check_names(model, converted, full, strict=strict)
    rest = dict(full)
    state = {}
    for experts in converted:
        mine = {name: rest.pop(f"{experts.prefix}{name}", None) for name in experts.file_shapes}
        if None not in mine.values():
            for name, value in experts.adapter.from_file(mine).items():
                state[f"{experts.prefix}{name}"] = fit(f"{experts.prefix}{name}", value)
    return {**state, **{key: fit(key, value) for key, value in rest.items()}}


def _check_names(model: nn.Module, converted: Sequence[Converted], full: Mapping[str, Any], *, strict: bool) -> None:
    """What `load_state_dict` checks, in its words, for the names that the file has."""
    if not converted:
        return
    errors = []
    names = [key for key in model.state_dict() if not key.startswith(tuple(experts.prefix for experts in converted))]
    for experts in converted:
        shapes = {f"{experts.prefix}{name}": shape for name, shape in experts.file_shapes.items()}
        names += shapes
        found = [name for name in shapes if name in full]
        if found and len(found) < len(shapes) and not strict:
            errors.append(
                f"{experts.prefix[:-1]} takes all or none of its {len(shapes)} tensors, as it is stacked, but the"
                f" checkpoint has {len(found)} of them: {next(name for name in shapes if name not in full)} is missing."
            )
        errors += [
            f"size mismatch for {name}: copying a param with shape {full[name].shape} from checkpoint, the shape in"
            f" current model is {shapes[name]}."
            for name in found
            if full[name].shape != shapes[name]
        ]
    if strict:
        expected = set(names)
        for kind, keys in (
            ("Missing", [name for name in names if name not in full]),
            ("Unexpected", [key for key in full if key not in expected]),
        ):
            if keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                errors.append(f"{kind} key(s) in state_dict: {quoted}.")
    if errors:
        raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {type(model).__name__}:", *errors]))


# Optimizer state.


@dataclass(frozen=True)
class Place:
    """A place in an optimizer's list of parameters: a parameter, or all those of a converted module in one group."""

    experts: Converted | None

    numbers: dict[str, int]
    """In memory: what is there, by its name within the module, and how the optimizer numbers it."""

    file_names: list[str]
    """In a file: what is there, in order."""


def optimizer_to_file(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """From the state dict of `optimizer`, with whole tensors, to that of an optimizer of the plain model.

    Raises:
        NotImplementedError: the optimizer keeps something that cannot be divided among experts.
    """
    state: dict[int, State] = {}
    groups = []
    before, number = 0, 0
    for of_group, group in zip(_places(model, optimizer), saved["param_groups"], strict=True):
        first, names = number, []
        for place in of_group:
            states = {name: saved["state"].get(n, {}) for name, n in place.numbers.items()}
            if place.experts is not None:
                experts = place.experts
                states = _convert(states, experts.shapes, experts.made_of, experts.adapter.to_file)
            state.update({number + n: states[key] for n, key in enumerate(place.file_names) if states.get(key)})
            if "param_names" in group:
                inner, n = next(iter(place.numbers.items()))
                known = group["param_names"][n - before]
                prefix = known.removesuffix(inner)
                names += [known] if place.experts is None else [f"{prefix}{name}" for name in place.file_names]
            number += len(place.file_names)
        before += len(group["params"])
        groups.append({**group, "params": list(range(first, number)), **({"param_names": names} if names else {})})
    return {"state": state, "param_groups": groups}


def optimizer_from_file(
    model: nn.Module, optimizer: Optimizer, full: Mapping[str, Any], *, fit: Callable[[nn.Parameter, Any], Any]
) -> dict[str, Any]:
    """From the state dict of an optimizer of the plain model to one that `optimizer` loads.

    Adam's step count is one for all experts here: the largest of theirs.

    Args:
        model: has its experts spread.
        optimizer: of the model.
        full: the plain model's.
        fit: from a parameter in memory and a whole tensor to what this rank keeps of it; called as soon as it is made.

    Raises:
        ValueError: a group has another number of parameters than the optimizer's.
        NotImplementedError: the optimizer keeps something that cannot be divided among experts.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = _places(model, optimizer)
    if len(places) == len(full["param_groups"]):  # else the optimizer says so
        for g, (of_group, group) in enumerate(zip(places, full["param_groups"], strict=True)):
            count = sum(len(place.file_names) for place in of_group)
            if count != len(group["params"]):
                raise ValueError(
                    f"group {g} of the {type(optimizer).__name__} in the checkpoint has {len(group['params'])}"
                    f" parameters, that of the model {count}; group them as they were grouped then"
                    + (" (by ndim? stacked experts have one more)" if any(place.experts for place in of_group) else "")
                )
    state: dict[int, State] = {}
    groups = []
    for of_group, group, ours in zip(places, full["param_groups"], optimizer.param_groups, strict=False):
        numbers = iter(group["params"])
        for place in of_group:
            states = {name: full["state"].get(next(numbers), {}) for name in place.file_names}
            keep = {name: partial(fit, parameters[n]) for name, n in place.numbers.items()}
            if place.experts is None:
                states = {name: {k: keep[name](v) for k, v in of_one.items()} for name, of_one in states.items()}
            else:
                goes_into = {name: pieces for name, pieces in place.experts.goes_into.items() if name in keep}
                states = _convert(states, place.experts.file_shapes, goes_into, place.experts.adapter.from_file, keep)
            state.update({n: states[name] for name, n in place.numbers.items() if states.get(name)})
        own = {"params": [n for place in of_group for n in place.numbers.values()]}
        groups.append({**ours, **group, **own, **{key: ours[key] for key in ("param_names",) if key in ours}})
    return {"state": state, "param_groups": groups}


def _places(model: nn.Module, optimizer: Optimizer) -> list[list[Place]]:
    """The places of each group; the optimizer of a plain model lists the pieces of a module together, in order."""
    owners = {id(p): (experts, name) for experts in converted_modules(model) for name, p in experts.parameters.items()}
    number = 0
    groups = []
    for group in optimizer.param_groups:
        of_group: list[Place] = []
        of_experts: dict[str, Place] = {}
        for parameter in group["params"]:
            experts, name = owners.get(id(parameter), (None, "parameter"))
            if experts is None:
                of_group.append(Place(None, {name: number}, [name]))
            elif experts.prefix in of_experts:
                of_experts[experts.prefix].numbers[name] = number
            else:
                of_group.append(of_experts.setdefault(experts.prefix, Place(experts, {name: number}, [])))
            number += 1
        for place in of_experts.values():
            assert place.experts is not None
            made_of = place.experts.made_of
            place.file_names.extend(name for name in made_of if any(n in place.numbers for n in made_of[name]))
        groups.append(of_group)
    return groups


def _convert(
    states: Mapping[str, State],
    shapes: Mapping[str, torch.Size],
    made_of: Mapping[str, Sequence[str]],
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    keep: Mapping[str, Callable[[Any], Any]] | None = None,
) -> dict[str, State]:
    """What an optimizer keeps, taken the way of the parameters.

    Args:
        states: by parameter; empty for one that was never stepped.
        shapes: of all parameters of the module.
        made_of: which of them each result is made of.
        convert: the parameters' way.
        keep: what becomes of a result, by the name of its parameter, as soon as it is made.

    Returns:
        By parameter, for each of which something was kept.
    """
    reached = [name for name, sources in made_of.items() if any(states.get(source) for source in sources)]
    needed = {source for name in reached for source in made_of[name]}
    result: dict[str, State] = {name: {} for name in reached}
    for key in dict.fromkeys(key for state in states.values() for key in state):
        values = {name: state[key] for name, state in states.items() if key in state}
        example = next(iter(values.values()))
        if _is_whole(key, values, shapes):
            # What was never stepped has zeros; what is not needed takes part for the form only.
            absent = {
                name: torch.zeros((), dtype=example.dtype, device=None if name in needed else "meta") for name in shapes
            }
            made = convert({name: values.get(name, absent[name].expand(shape)) for name, shape in shapes.items()})
            for name in reached:
                result[name][key] = made[name] if keep is None else keep[name](made[name])
        else:
            for name in reached:
                largest = max(float(values[source]) for source in made_of[name] if source in values)
                result[name][key] = (
                    torch.full_like(example, largest) if isinstance(example, Tensor) else type(example)(largest)
                )
    return result


def _is_whole(key: str, values: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> bool:
    """Whether the optimizer keeps a tensor of the parameter's shape, rather than a number.

    Raises:
        NotImplementedError: it keeps neither.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if key != "step" and tensors and all(value.shape == shapes[name] for name, value in tensors.items()):
        return True
    for name, value in tensors.items():
        if value.numel() != 1:
            raise NotImplementedError(
                f"the optimizer keeps a {key} of shape {list(value.shape)} for a parameter of shape"
                f" {list(shapes[name])}, which cannot be divided among experts; save a folder"
                " (save_distributed_checkpoint=True) instead of one file"
            )
    return False
