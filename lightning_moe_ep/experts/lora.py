"""LoRA on expert weights: PEFT's adapters on the parameters of an experts module (`target_parameters`), spread with it.

PEFT wraps the experts module, once for each parameter, and keeps the adapters of all experts in two matrices:
`lora_A [E * r, in]`, expert by expert, and `lora_B [out, r * E]`, with the expert as the fastest index of the columns.
Here they become `[E, r, in]` and `[E, out, r]` under the same names, to be cut by experts like the weights. PEFT adds
their product to the weight; here it is the rows that go through both, which is less to do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_moe_ep.experts.adapter import (
    Computation,
    Dispatch,
    ExpertsAdapter,
    adapter_for,
    is_a,
    local_parameter,
    register_experts,
)
from lightning_moe_ep.experts.compute import LowRank, with_low_rank
from lightning_moe_ep.rows import RowGroups


@register_experts
class LoraExperts(ExpertsAdapter):
    """An experts module inside of one or more of PEFT's `ParamWrapper` (read at peft 0.21)."""

    def __init__(self, wrappers: Sequence[nn.Module], base: ExpertsAdapter) -> None:
        """
        Args:
            wrappers: the outermost first.
            base: serves the experts module inside of them.
        """
        super().__init__(wrappers[0])
        self.base = base
        self.computations = base.computations  # those of this one, not of the class
        self.routes_tokens = base.routes_tokens
        self._wrappers = {"base_layer." * depth: wrapper for depth, wrapper in enumerate(wrappers)}
        self._transposed = getattr(base.module, "is_transposed", False)  # as PEFT saw it, before base.prepare()
        self._base_prefix = "base_layer." * len(wrappers)
        self._firsts = [
            f"{at}lora_A.{name}.weight" for at, wrapper in self._wrappers.items() for name in wrapper.lora_A
        ]
        self._seconds = [name.replace("lora_A.", "lora_B.") for name in self._firsts]
        self.parameters = [*(self._base_prefix + name for name in base.parameters), *self._firsts, *self._seconds]

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        wrappers = []
        experts = module
        while is_a(experts, "ParamWrapper"):
            wrappers.append(experts)
            experts = experts.base_layer
        base = adapter_for(experts, around) if wrappers else None
        if base is None:
            return None
        for wrapper in wrappers:
            _check(wrapper, base)
        return cls(wrappers, base)

    @property
    @override
    def num_experts(self) -> int:
        return self.base.num_experts

    @override
    def prepare(self) -> None:
        self.base.prepare()
        for names, change in ((self._firsts, _split_first), (self._seconds, _split_second)):
            for name in names:
                linear = self.module.get_submodule(name.removesuffix(".weight"))
                weight = change(linear.weight.detach(), self.num_experts).contiguous()
                linear.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
        for wrapper in self._wrappers.values():
            wrapper.reset_lora_parameters = partial(_reset, wrapper)

    @override
    def completed(self, dispatch: Dispatch) -> Dispatch:
        return self.base.completed(dispatch)

    @override
    def install(self, dispatch: Dispatch, *, alone: bool) -> None:
        self.base.install(dispatch, alone=False)  # its own forward knows nothing of adapters
        experts = self.base.module

        def forward(*args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
            if adapter_names is not None:
                raise ValueError("adapters on expert weights do not know batches of several adapters (adapter_names)")
            return experts.forward(*args, **kwargs)

        self.module.forward = forward

    @override
    def compute(self, rows: Tensor, groups: RowGroups, weights: Tensor | None, *, computation: Computation) -> Tensor:
        by_rows = self.base.by_compute_experts and computation != "native"
        base = copy.copy(self.base)
        base.module = (with_low_rank if by_rows else _with_whole)(base.module, self._low_rank())
        return base.compute(rows, groups, weights, computation=computation)

    def _low_rank(self) -> dict[str, list[LowRank]]:
        """What the adapters that are active now add to each parameter that has some, on this rank's experts."""
        low_rank: dict[str, list[LowRank]] = {}
        for wrapper in self._wrappers.values():
            adapters = [] if wrapper.disable_adapters else wrapper.active_adapters
            parts = low_rank[wrapper.parameter_name] = []
            for name in adapters:
                if name in wrapper.lora_A:
                    first, second = (local_parameter(by[name], "weight") for by in (wrapper.lora_A, wrapper.lora_B))
                    left, right = (first.mT, second.mT) if self._transposed else (second, first)
                    parts.append(LowRank(left, right, wrapper.scaling[name]))
        return low_rank

    @override
    def to_file(self, state: dict[str, Any]) -> dict[str, Any]:
        return self._converted(state, _join_first, _join_second, self.base.to_file)

    @override
    def from_file(self, state: dict[str, Any]) -> dict[str, Any]:
        split_first = partial(_split_first, num_experts=self.num_experts)
        split_second = partial(_split_second, num_experts=self.num_experts)
        return self._converted(state, split_first, split_second, self.base.from_file)

    def _converted(
        self,
        state: Mapping[str, Any],
        first: Callable[[Tensor], Tensor],
        second: Callable[[Tensor], Tensor],
        base: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        change = {**dict.fromkeys(self._firsts, first), **dict.fromkeys(self._seconds, second)}
        converted: dict[str, Any] = {}
        of_base: dict[str, Any] = {}
        for key, value in state.items():
            if key.startswith(self._base_prefix):
                of_base[key.removeprefix(self._base_prefix)] = value
            else:
                converted[key] = change[key](value) if key in change else value
        if of_base:
            return {**{self._base_prefix + key: value for key, value in base(of_base).items()}, **converted}
        return converted


def initialise_adapters(layer: nn.Module, around: Sequence[nn.Module]) -> None:
    """Give all adapters of one of PEFT's LoRA layers the initial values that PEFT gives them.

    Args:
        layer: has `reset_lora_parameters`.
        around: the modules that hold it; one has the adapters' configurations.
    """
    configs: dict[str, Any] = next((vars(outer)["peft_config"] for outer in around if "peft_config" in vars(outer)), {})
    for name in (*layer.lora_A, *layer.lora_embedding_A):
        layer.reset_lora_parameters(name, configs[name].init_lora_weights)


def _check(wrapper: nn.Module, base: ExpertsAdapter) -> None:
    """Refuse what is not computed here, in words that complete "the experts module NAME (CLASS) ..."."""
    name = wrapper.parameter_name
    shape = list(base.module.get_parameter(name).shape)
    if name not in base.parameters or len(shape) != 3 or shape[0] != base.num_experts:
        raise NotImplementedError(
            f"has a LoRA adapter on its {name} {shape}; only stacked weights [E, ...] of three dimensions can have one,"
            f" with E = {base.num_experts} here. Take it out of target_parameters"
        )
    refused = {
        "dropout": any(not isinstance(dropout, nn.Identity) for dropout in wrapper.lora_dropout.values()),
        "a bias": any(wrapper.lora_bias.values()),
        "DoRA": any(wrapper.use_dora.values()),
        "another variant of LoRA": bool(wrapper.lora_variant),
        "merged weights (call unmerge_adapter first)": wrapper.merged,
    }
    if found := [what for what, there in refused.items() if there]:
        raise NotImplementedError(
            f"has a LoRA adapter on its {name} with {' and '.join(found)}, which cannot be spread; use plain LoRA there"
        )


def _with_whole(module: nn.Module, low_rank: Mapping[str, Sequence[LowRank]]) -> nn.Module:
    """A shallow copy with this rank's weights, to which is added what adapters add, for whatever way to compute."""
    local = copy.copy(module)
    local._parameters = dict(module._parameters)
    for name, parts in low_rank.items():
        spread, weight = getattr(module, name), local_parameter(module, name)
        weight = sum((part.whole().to(weight.dtype) for part in parts), weight)
        if isinstance(spread, DTensor):  # its shape says how many experts there are
            weight = DTensor.from_local(weight, spread.device_mesh, spread.placements, run_check=False)
        local._parameters[name] = weight
    return local


@torch.no_grad()
def _reset(wrapper: nn.Module, adapter_name: str, init_lora_weights: bool | str) -> None:
    """In place of `ParamWrapper.reset_lora_parameters`: its initial values depend on its layout."""
    ours = [(wrapper.lora_A[adapter_name], _join_first, _split_first)]
    ours.append((wrapper.lora_B[adapter_name], _join_second, _split_second))
    weights = [linear.weight for linear, _, _ in ours]
    for linear, join, _ in ours:
        linear.weight = nn.Parameter(join(linear.weight), requires_grad=False)
    type(wrapper).reset_lora_parameters(wrapper, adapter_name, init_lora_weights)
    for (linear, _, split), weight in zip(ours, weights, strict=True):
        weight.copy_(split(linear.weight, len(weight)))
        linear.weight = weight


def _split_first(weight: Tensor, num_experts: int) -> Tensor:
    """From `[E * r, in]` to `[E, r, in]`."""
    return weight.unflatten(0, (num_experts, -1))


def _join_first(weight: Tensor) -> Tensor:
    return weight.flatten(0, 1)


def _split_second(weight: Tensor, num_experts: int) -> Tensor:
    """From `[out, r * E]`, the expert being the fastest index, to `[E, out, r]`."""
    return weight.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def _join_second(weight: Tensor) -> Tensor:
    return weight.permute(1, 2, 0).flatten(1, 2)
