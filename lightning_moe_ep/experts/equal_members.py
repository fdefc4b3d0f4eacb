"""Whether a ModuleList holds experts: equal MLPs beside a router.

A list goes in; the widths of its MLPs come out, or what keeps it from being such a list. Everything is told from the
modules' structure and from calls on the meta device, so that nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_moe_ep.experts.adapter import adapter_for

_ROWS = 5
"""Rows of the calls on the meta device; unlike the sizes that a model is likely to have."""

_PLAIN_ATTRIBUTES = frozenset(vars(nn.Module()))


class UnequalError(ValueError):
    """The members are not equal MLPs; the message says which is not, or why."""


def router_widths(members: nn.ModuleList, around: Sequence[nn.Module]) -> list[int]:
    """Each H of a weight `[E, H]` or `[H, E]` beside the list: in the innermost module around that has any weights."""
    inside = set(members.modules())
    for outer in around:
        owners = [owner for owner in outer.modules() if owner not in inside]
        weights = [
            p for owner in owners if not isinstance(owner, nn.Embedding) for p in owner.parameters(recurse=False)
        ]
        if weights:
            matrices = [tuple(p.shape) for p in weights if p.ndim == 2]
            widths = [shape[1 - dim] for shape in matrices for dim in (0, 1) if shape[dim] == len(members)]
            return list(dict.fromkeys(widths))
    return []


def mlp_widths(members: Sequence[nn.Module], around: Sequence[nn.Module], widths: Sequence[int]) -> tuple[int, int]:
    """The widths of what each member takes and gives.

    Args:
        members: those of the list.
        around: the list and the modules that hold it, the innermost first.
        widths: those that members may take.

    Raises:
        UnequalError: the members are not equal, or no MLPs.
    """
    if difference := _difference(members):
        raise UnequalError(difference)
    first = members[0]
    if found := _what_is_no_mlp(members, around):
        raise UnequalError(found)
    failures = []
    for width in widths:
        try:
            output = functional_call(first, _on_meta(first), _rows(first, width))
        except Exception as error:
            failures.append(f"called with rows [{_ROWS}, {width}] it raises {type(error).__name__}: {error}")
            continue
        if isinstance(output, Tensor) and output.ndim == 2 and len(output) == _ROWS:
            return width, output.shape[1]
        given = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        failures.append(f"called with rows [{_ROWS}, {width}] it gives {given}")
    raise UnequalError(f"a {type(first).__name__} is no MLP: {'; '.join(failures)}")


def runs_grouped(member: nn.Module, width: int) -> bool:
    """Whether all parameters of the member are those of Linears that it does nothing but call, each with rows."""
    linears = {name: module for name, module in member.named_modules() if type(module) is nn.Linear}
    of_linears = [p for linear in linears.values() for p in linear.parameters(recurse=False)]
    if len(of_linears) != len(list(member.parameters())):
        return False

    def rows_only(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(rows: Tensor) -> Tensor:
            if rows.shape != (_ROWS, linear.in_features):
                raise ValueError
            return rows.new_empty(_ROWS, linear.out_features)

        return forward

    inputs = _rows(member, width)
    held = {linear: dict(linear._parameters) for linear in linears.values()}
    try:
        for linear in held:  # without weights, so that it shows if something else than their forward uses them
            linear._parameters.update(dict.fromkeys(linear._parameters))
        with forwards({linear: rows_only(linear) for linear in held}):
            return member(inputs).shape[0] == _ROWS
    except Exception:
        return False
    finally:
        for linear, parameters in held.items():
            linear._parameters.update(parameters)


@contextmanager
def forwards(replaced: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Inside, these modules have another forward."""
    before = {module: vars(module).get("forward") for module in replaced}
    for module, forward in replaced.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _rows(member: nn.Module, width: int) -> Tensor:
    dtype = next((p.dtype for p in member.parameters() if p.is_floating_point()), None)
    return torch.empty(_ROWS, width, dtype=dtype, device="meta")


def _on_meta(member: nn.Module) -> dict[str, Tensor]:
    return {name: torch.empty_like(p, device="meta") for name, p in member.named_parameters()}


def _difference(members: Sequence[nn.Module]) -> str | None:
    """The first thing in which a member is unlike the first."""
    absent = [number for number, member in enumerate(members) if member is None]
    if absent:
        return f"member {absent[0]} is None (was the list built for another expert parallelism?)"
    first = members[0]
    right = _parameters(first)
    for number, member in enumerate(members):
        if type(member) is not type(first):
            return f"member {number} is a {type(member).__name__}, the first a {type(first).__name__}"
        if (mine := _parameters(member)) != right:
            name = next(n for n in {**right, **mine} if mine.get(n) != right.get(n))
            has = mine.get(name, "no such parameter")
            return f"member {number} has {name}: {has}, the first {right.get(name, 'no such parameter')}"
        if different := _different_attribute(first, member):
            return f"member {number} has {different}"
    return None


def _parameters(member: nn.Module) -> dict[str, str]:
    return {
        name: f"{list(p.shape)} in {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in member.named_parameters()
    }


def _different_attribute(first: nn.Module, other: nn.Module) -> str | None:
    pairs = zip(first.named_modules(), other.named_modules(), strict=False)
    for (name, mine), (_, theirs) in pairs:
        if type(mine) is not type(theirs):
            return f"{name}: a {type(theirs).__name__}, the first a {type(mine).__name__}"
        prefix = f"{name}." if name else ""
        for key, value in vars(mine).items():
            if key not in _PLAIN_ATTRIBUTES and not _same(value, vars(theirs).get(key)):
                return f"{prefix}{key}={vars(theirs).get(key)!r}, the first {value!r}"
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two attributes mean the same, as far as can be told; objects such as configurations do if of one type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and (one.is_meta or torch.equal(one, other))
    if isinstance(one, int | float | str | tuple | list | torch.dtype | torch.Size):
        return one == other
    return getattr(one, "__qualname__", None) == getattr(other, "__qualname__", None)


def _what_is_no_mlp(members: Sequence[nn.Module], around: Sequence[nn.Module]) -> str | None:
    first, root = members[0], around[-1]
    if buffers := [name for name, _ in first.named_buffers()]:
        return f"a {type(first).__name__} has the buffer {buffers[0]}, which cannot be told from one to another expert"
    for name, parameter in first.named_parameters():
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            return f"{name} of a {type(first).__name__} is a {type(parameter).__name__} of {parameter.dtype}"
    for name, owner in first.named_modules():
        own = list(owner.parameters(recurse=False))
        if own and not isinstance(owner, nn.Linear) and owner is not first and any(p.ndim > 1 for p in own):
            return f"{name} of a {type(first).__name__} is a {type(owner).__name__}, no Linear"
        if isinstance(owner, nn.ModuleList) and len(owner) > 1 and _has_experts(owner, name, [first, *around]):
            return f"{name} of a {type(first).__name__} holds experts itself"
    if not any(True for _ in first.parameters()):
        return f"a {type(first).__name__} has no parameters"
    mine = [p for member in members for _, p in member.named_parameters(remove_duplicate=False)]
    ids = {id(p) for p in mine}
    everywhere = sum(id(p) in ids for _, p in root.named_parameters(remove_duplicate=False))
    if len(ids) < len(mine) or everywhere > len(mine):
        return "members share parameters with each other or with the rest of the model"
    return None


def _has_experts(inner: nn.ModuleList, name: str, around: Sequence[nn.Module]) -> bool:
    path = name.split(".")
    between = [around[0].get_submodule(".".join(path[:length])) for length in range(len(path) - 1, 0, -1)]
    try:
        return adapter_for(inner, [*between, *around]) is not None
    except NotImplementedError:
        return True
