"""Finding the routers of a model by where they are and what they hold.

A model goes in, plain or parallel; for each of its experts modules the module that chooses among its experts comes out.
They are also what a list of modules to compute in fp32 may name all at once.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_moe_ep.experts.find import ExpertsModule, find_experts

RouterDtype = Literal["auto", "float32"]
"""In which dtype routers are kept and compute: as the precision says, or in fp32."""

ROUTERS = "<routers>"
"""In place of a module's name: all routers of a model."""


def with_routers(fp32_modules: Sequence[str], router_dtype: str) -> list[str]:
    """The names of the modules that compute in fp32, routers among them where they are to.

    Raises:
        ValueError: there is no such router_dtype.
    """
    if router_dtype not in get_args(RouterDtype):
        raise ValueError(f"router_dtype={router_dtype!r} is not known; use one of {list(get_args(RouterDtype))}")
    return [*fp32_modules, *([ROUTERS] if router_dtype == "float32" else [])]


def modules_called(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules whose paths are, or end in, one of these names, `ROUTERS` being all routers; inner ones first.

    Raises:
        ValueError: there is none for a name, or it has experts in it; or a router is not found.
        NotImplementedError: the code around a router uses its weight without calling it.
    """
    experts = {found.module: found.name for found in find_experts(model)} if names else {}
    found: dict[nn.Module, int] = {}
    for name in names:
        if name == ROUTERS:
            found.update({router: path.count(".") for path, router in _called_routers(model)})
            continue
        matching = {m: path.count(".") for path, m in model.named_modules() if f".{path}".endswith(f".{name}")}
        if not matching:
            raise ValueError(
                f"fp32_modules has {name!r}, but no module's path ends so; the experts are at"
                f" {next(iter(experts.values()))}"
            )
        for module in matching:
            if inside := [experts[part] for part in module.modules() if part in experts]:
                raise ValueError(f"fp32_modules has {name!r}, a module with the experts {inside[0]} in it; name others")
        found.update(matching)
    return sorted(found, key=lambda module: -found[module])


def logits_of(output: Any, num_experts: int) -> Tensor | None:
    """The logits `[..., E]` among what a router gave; wider ones where it may choose no expert, too."""
    tensors = [value for value in (output if isinstance(output, tuple) else (output,)) if isinstance(value, Tensor)]
    floats = [value for value in tensors if value.is_floating_point() and value.ndim > 0]
    logits = [value for value in floats if value.shape[-1] == num_experts]
    if not logits:
        return next((value for value in floats if value.ndim == 2 and value.shape[-1] > num_experts), None)
    # Routers give weights after logits, but those that give scores of all experts give these first.
    weights_too = any(not value.is_floating_point() and value.shape == logits[0].shape for value in tensors)
    return logits[0] if weights_too else logits[-1]


def fit_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Have routers that compute in fp32 give all but logits and weights in the dtype of the model around.

    Logits `[T, E]`, and weights `[T, K]` that go to the experts, serve in any dtype. What else there is, or weights
    that the model multiplies by itself, may meet its other weights.
    """
    for router, found in routers_with_experts(model).items():
        # FSDP2's hooks around it break the graph anyhow; torch 2.13 compiles this loop over types wrongly.
        router.register_forward_hook(torch.compiler.disable(partial(_fit_output, found, dtype)))


def _fit_output(found: ExpertsModule, dtype: torch.dtype, router: nn.Module, args: Any, output: Any) -> Any:
    if not isinstance(output, tuple):
        return output
    tensors = [value for value in output if isinstance(value, Tensor)]
    index = {value.shape for value in tensors if not value.is_floating_point() and found.adapter.routes_tokens}
    given = []
    for value in output:
        if isinstance(value, Tensor) and value.is_floating_point():
            if value.shape in index:
                index.remove(value.shape)  # the first; another is something else
            elif value.shape[-1] < found.num_experts or value.ndim != 2:
                value = value.to(dtype)
        given.append(value)
    return tuple(given)


def _called_routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The path of each router, once, and it.

    Raises:
        NotImplementedError: the code around one uses its weight without calling it.
    """
    names = {module: name for name, module in model.named_modules()}
    for router in routers_with_experts(model):
        outer, _, key = names[router].rpartition(".")
        around = model.get_submodule(outer)
        if parameter := _taken_from(around, key, [name for name, _ in router.named_parameters()]):
            raise NotImplementedError(
                f"router_dtype='float32' has FSDP2 gather {names[router]} by itself when it is called, but"
                f" {type(around).__name__} uses its {parameter} without calling it; call the router there, or leave"
                " router_dtype out"
            )
        yield names[router], router


def _taken_from(around: nn.Module, key: str, parameters: Sequence[str]) -> str | None:
    """A parameter of its child `key` that the module's own code uses as such, not for its dtype or shape."""
    functions = [value for base in type(around).__mro__ for value in vars(base).values() if hasattr(value, "__code__")]
    for function in functions:
        loaded = [step.argval for step in dis.get_instructions(function) if step.opname.startswith("LOAD_")]
        for first, second, third in zip(loaded, loaded[1:], [*loaded[2:], None], strict=False):
            if first == key and second in parameters and third not in ("dtype", "device", "shape"):
                return second
    return None


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The router of each experts module, by the experts module's name; experts modules may share one.

    It is the child, of the nearest module around the experts that has one, which owns a parameter `[E, ...]` of two
    dimensions or has an attribute with "expert" in its name that is E. Where several do, the one that has more of
    these, and a parameter `[E]`, is taken, then the smaller one.

    Raises:
        NoExpertsError: there is no experts module.
        ValueError: nothing around some experts module, within its block, looks like a router; names it.
    """
    return {found.name: router for found, router in _with_routers(model)}


def routers_with_experts(model: nn.Module) -> dict[nn.Module, ExpertsModule]:
    """Each router once, with the experts module (the last of several) that it chooses for; raises as `find_routers`."""
    return {router: found for found, router in _with_routers(model)}


def _with_routers(model: nn.Module) -> list[tuple[ExpertsModule, nn.Module]]:
    experts = find_experts(model)
    inside = {part for found in experts for part in found.module.modules()}
    return [(found, _router_of(model, found, inside)) for found in experts]


def _router_of(model: nn.Module, found: ExpertsModule, inside: set[nn.Module]) -> nn.Module:
    path, num_experts = found.name.split("."), found.num_experts
    for length in range(len(path) - 1, -1, -1):
        outer = model.get_submodule(".".join(path[:length]))
        if isinstance(outer, nn.ModuleList):  # of blocks
            break
        scores = {
            child: score
            for child in outer.children()
            if inside.isdisjoint(child.modules()) and (score := _likeness(child, num_experts))
        }
        if scores:
            return max(scores, key=lambda child: (scores[child], -sum(p.numel() for p in child.parameters())))
    raise ValueError(
        f"no router was found around the {num_experts} experts of {found.name}: no module beside them owns a parameter"
        f" [{num_experts}, ...] of two dimensions or says, in an attribute with 'expert' in its name, that they are"
        f" {num_experts}"
    )


def _likeness(module: nn.Module, num_experts: int) -> int:
    """How many signs of a router there are; 0 if only one that many other modules have."""
    rows = {parameter.ndim for parameter in module.parameters() if parameter.shape[:1] == (num_experts,)}
    says = any(
        "expert" in key and type(value) is int and value == num_experts
        for part in module.modules()
        for key, value in vars(part).items()
    )
    return (2 in rows) + says + (1 in rows) if 2 in rows or says else 0
