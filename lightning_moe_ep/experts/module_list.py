"""Experts that are a ModuleList of equal MLPs: older models, remote code, a user's own.

The list becomes one module with parameters `[E, ...]`; the block around it goes on calling `self.experts[i](rows)`, and
its own routing decides. Files have one set of parameters for each expert, as the plain model's have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep.experts.adapter import Computation, Dispatch, ExpertsAdapter, local_parameter, register_experts
from lightning_moe_ep.experts.compute import takes_grouped_mm
from lightning_moe_ep.experts.equal_members import UnequalError, forwards, mlp_widths, router_widths, runs_grouped
from lightning_moe_ep.experts.members import StackedMembers, with_tie
from lightning_moe_ep.experts.stacked import with_zero_gradients
from lightning_moe_ep.experts.two_passes import OnePass, TwoPasses
from lightning_moe_ep.rows import RowGroups


@register_experts
class ModuleListExperts(ExpertsAdapter):
    """A ModuleList of at least two equal MLPs, with a router's weight `[E, H]` or `[H, E]` beside it.

    Where all experts are on one rank, each call computes by itself, as in the plain model, whatever the `computation`.
    """

    block: nn.Module
    equal_tokens = False  # how many rows a rank sends is up to the block
    called_with_routing = False
    routes_tokens = False

    def __init__(self, module: nn.ModuleList, around: Sequence[nn.Module], widths: tuple[int, int]) -> None:
        super().__init__(module)
        self.parameters = [name for name, _ in module[0].named_parameters()]
        self._around, self._widths = around, widths
        self._num_experts = len(module)
        self.block = next(outer for outer in around if not isinstance(outer, nn.ModuleList | nn.ModuleDict))
        self._block_class = type(self.block).__name__  # FSDP2 renames it
        self._grouped = runs_grouped(module[0], widths[0])
        self.computations = frozenset({"auto", "loop", *(["grouped_mm"] if self._grouped else [])})

    @classmethod
    @override
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        if isinstance(module, StackedMembers):  # spread already
            return cast(Self, module.adapter)
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            return None
        widths = router_widths(module, around)
        if not widths or all(isinstance(outer, nn.ModuleList | nn.ModuleDict) for outer in around):
            return None
        try:
            return cls(module, around, mlp_widths(list(module), [module, *around], widths))
        except UnequalError as error:
            if not called_experts(module, around[0]):
                return None
            raise NotImplementedError(
                f"is a ModuleList of {len(module)} beside a router's weight of width {widths[0]}, but not of equal"
                f" MLPs, which alone are stacked: {error}. Make its members equal MLPs, or describe it with"
                " register_experts"
            ) from None

    @property
    @override
    def num_experts(self) -> int:
        return self._num_experts

    @override
    def prepare(self) -> None:
        members = list(self.module)
        first = members[0]
        for name in self.parameters:
            parts = [member.get_parameter(name) for member in members]
            stacked = nn.Parameter(torch.stack([part.detach() for part in parts]), parts[0].requires_grad)
            owner, _, key = name.rpartition(".")
            for member in members:  # each gives its part back before the next parameter is stacked
                member.get_submodule(owner)._parameters[key] = None
            first.get_submodule(owner)._parameters[key] = stacked
            del parts
        experts = StackedMembers(first, len(members), widths=self._widths, adapter=self)
        for key, child in self._around[0]._modules.items():
            if child is self.module:
                self._around[0]._modules[key] = experts
        self.module = experts

    @override
    def install(self, dispatch: Dispatch, *, alone: bool) -> None:
        experts = self.module
        assert isinstance(experts, StackedMembers)
        if alone:
            self.block.forward = OnePass(self.block, experts, self._unbound)
        else:
            self.block.forward = TwoPasses(self.block, experts, self._unbound, dispatch, name=self._description)

    @override
    def compute(self, rows: Tensor, groups: RowGroups, weights: Tensor | None, *, computation: Computation) -> Tensor:
        # The weights are ones: the block multiplies by its own.
        if self._use_grouped_mm(computation) and len(rows):
            outputs, ties = self._compute_grouped(rows, groups)
        else:
            parameters, ties = self._unbound()
            outputs = torch.cat(
                [
                    rows.new_empty(0, self._widths[1]),
                    *(
                        self.module.run({name: parts[number] for name, parts in parameters.items()}, chunk)
                        for number, chunk in enumerate(rows.split(groups.counts))
                        if len(chunk)
                    ),
                ]
            )
        # Without rows the outputs hang on nothing, but the collectives behind the rows have a backward, too.
        return with_zero_gradients(outputs.to(rows.dtype), ties if len(rows) else [rows, *ties])

    @override
    def to_file(self, state: dict[str, Any]) -> dict[str, Any]:
        parts = {name: [part.clone() for part in state.pop(name).unbind()] for name in list(state)}
        return {f"{number}.{name}": parts[name][number] for number in range(self._num_experts) for name in parts}

    @override
    def from_file(self, state: dict[str, Any]) -> dict[str, Any]:
        names = [name.removeprefix("0.") for name in state if name.startswith("0.")]
        return {name: torch.stack([state[f"{number}.{name}"] for number in range(self._num_experts)]) for name in names}

    @override
    def one_expert(self) -> nn.Module:
        return self.module.member

    def _unbound(self) -> tuple[dict[str, tuple[Tensor, ...]], list[Tensor]]:
        """This rank's experts, apart; and ties of their parameters."""
        tied = {name: with_tie(local_parameter(self.module, name)) for name in self.parameters}
        return {name: whole.unbind() for name, (whole, _) in tied.items()}, [tie for _, tie in tied.values()]

    def _use_grouped_mm(self, computation: Computation) -> bool:
        if computation == "loop" or not self._grouped:
            return False
        weights = {name: local_parameter(self.module, name) for name in self.parameters if name.endswith("weight")}
        sizes = {f"{name} {way}": w.shape[dim] for name, w in weights.items() for dim, way in ((1, "out"), (2, "in"))}
        return takes_grouped_mm(next(iter(weights.values())), sizes, computation)

    def _compute_grouped(self, rows: Tensor, groups: RowGroups) -> tuple[Tensor, list[Tensor]]:
        """One run of the member's forward over all rows, in which each Linear is that of each row's expert."""
        tied = {name: with_tie(local_parameter(self.module, name)) for name in self.parameters}

        def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
            def forward(rows: Tensor) -> Tensor:
                outputs = F.grouped_mm(rows, weight.transpose(1, 2), offs=groups.offsets)
                if bias is None:
                    return outputs
                return outputs + bias.repeat_interleave(groups.sizes, dim=0, output_size=len(rows))

            return forward

        member = self.module.member
        linears = {
            module: f"{name}." if name else "" for name, module in member.named_modules() if type(module) is nn.Linear
        }
        replaced = {
            module: linear(tied[f"{prefix}weight"][0], tied[f"{prefix}bias"][0] if module.bias is not None else None)
            for module, prefix in linears.items()
        }
        with forwards(replaced):
            return self.module.run({}, rows), [tie for _, tie in tied.values()]

    def _description(self) -> str:
        names = {module: name for name, module in self._around[-1].named_modules()}
        return f"the experts of {self._block_class} ({names.get(self.module, '')})"


def called_experts(module: nn.ModuleList, outer: nn.Module) -> bool:
    """Whether the list is meant to hold experts, by its name or that of its members' class; for messages only."""
    names = [name for name, child in outer.named_children() if child is module]
    return any("expert" in name.lower() for name in [*names, *(type(member).__name__ for member in module)])
