"""What the package needs to know of a kind of experts module, and the registry of kinds.

An adapter says how an experts module is recognised, which of its parameters carry the expert dimension, how it is
called, and what its experts compute. One instance serves one experts module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe_ep.rows import RowGroups

Computation = Literal["auto", "grouped_mm", "loop", "native"]
"""How experts compute: `grouped_mm`, one kernel for all of them; `loop`, the readable reference; `native`, the module's
own forward (for transformers' experts whatever their `experts_implementation` names); `auto`, grouped_mm wherever the
kind of module, its sizes and the device admit it, else loop."""


class Dispatch(Protocol):
    """Has every token computed by its experts, wherever they are."""

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts' outputs.

        Args:
            hidden: `[T, H]`; T may be 0 and differ between ranks.
            top_k_index: `[T, K]` expert ids; one outside `[0, E)` chooses no expert.
            top_k_weights: `[T, K]`.

        Returns:
            `[T, H']`, H' being the width of the experts' outputs.
        """


class Watcher(Protocol):
    """Is told of the routing of each forward."""

    def __call__(self, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        """Both `[T, K]`, of this rank's tokens; an id outside `[0, E)` chooses no expert."""


class Replacement(Protocol):
    """Says how a forward is routed in place of the model."""

    def __call__(self, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """From the model's own `[T, K]`, of this rank's tokens, to others; None: the weights are as they are."""


class ExpertsAdapter(ABC):
    """Base of all adapters; see `register_experts`.

    The simplest kind sets `parameters` and defines `match` and `expert`, and `call` where the module is not called
    with `(hidden, top_k_index, top_k_weights)`.
    """

    parameters: Sequence[str]
    """The names, within the module, of its parameters of shape `[E, ...]` (or `[E * n, ...]`, expert by expert)."""

    computations: frozenset[str] = frozenset({"auto", "loop"})
    """Those of `Computation` that this kind, or this module, knows."""

    by_compute_experts: bool = False
    """Whether `compute` is `compute_experts` but for `native`, which has the rows go through LoRA's adapters too."""

    equal_tokens: bool = True
    """Whether ranks dispatch equally many tokens where the model's inputs have equally many."""

    called_with_routing: bool = True
    """Whether the plain module is called with the routing, as its second and third argument or by these names."""

    knows_none: bool = True
    """Whether the plain module's own forward takes ids outside `[0, E)`, and has them choose no expert, if any does."""

    routes_tokens: bool = True
    """Whether what is dispatched are the model's tokens with their routing, not rows that the model sorted itself."""

    block: nn.Module | None = None
    """The module around that calls the experts, where its forward is what `install` replaces: it stays in one piece."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @classmethod
    @abstractmethod
    def match(cls, module: nn.Module, around: Sequence[nn.Module]) -> Self | None:
        """An adapter for `module` if it is of this kind, else None.

        Args:
            module: any module of the model.
            around: the modules that hold it, the innermost first.

        Raises:
            NotImplementedError: it is of this kind, but in a form that cannot be served; the message completes "the
                experts module NAME (CLASS) ...".
        """

    @property
    def num_experts(self) -> int:
        """E, before the experts are spread; by default the first dimension of the first parameter."""
        return self.module.get_parameter(self.parameters[0]).shape[0]

    def prepare(self) -> None:  # noqa: B027
        """Change what has to change in the model before the experts are spread; by default nothing."""

    def completed(self, dispatch: Dispatch) -> Dispatch:
        """`dispatch` and what else the routing decides of a token, on its own rank; by default nothing."""
        return dispatch

    def install(self, dispatch: Dispatch, *, alone: bool) -> None:
        """Put `dispatch` in place of the module's own way to its experts.

        Args:
            dispatch: reaches all experts.
            alone: whether they are all on this rank (ep=1).
        """
        self.module.forward = partial(self.call, dispatch)

    def call(self, dispatch: Dispatch, *args: Any, **kwargs: Any) -> Any:
        """The module's forward: from what the model passes to what it expects, by way of `dispatch`."""
        return dispatch(*args, **kwargs)

    def compute(self, rows: Tensor, groups: RowGroups, weights: Tensor | None, *, computation: Computation) -> Tensor:
        """Run the experts whose weights this rank holds; by default `expert` for one after the other.

        Args:
            rows: `[R, H]`, sorted by expert; R may be 0.
            groups: which rows belong to which of this rank's experts.
            weights: `[R]`, by which each row's output is multiplied; None: by 1.
            computation: one of `computations`.

        Returns:
            `[R, H']` in the dtype of `rows`. Every parameter of this rank's experts gets a gradient from it, zero for
            an expert without rows.
        """
        stacked = {name: self._of_experts(local_parameter(self.module, name), groups) for name in self.parameters}
        dtype = next((p.dtype for p in stacked.values() if p.is_floating_point()), rows.dtype)
        outputs = torch.cat(
            [
                self.expert({name: parameter[number] for name, parameter in stacked.items()}, chunk)
                for number, chunk in enumerate(rows.to(dtype).split(groups.counts))
            ]
        )
        return weigh(outputs, weights).to(rows.dtype)

    def expert(self, parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
        """One expert: from `[N, H]` to `[N, H']`; N may be 0.

        Args:
            parameters: its part of each of `parameters`, without the expert dimension.
            rows: its rows.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither `expert` nor `compute`")

    def to_file(self, state: dict[str, Any]) -> dict[str, Any]:
        """From the module's state dict in memory, with whole tensors, to the one that the plain model has.

        Optimizer state goes this way, too. It may run on the meta device, and has to be differentiable: autograd tells
        which parameters a tensor of the plain model comes from.
        """
        return state

    def from_file(self, state: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `to_file`."""
        return state

    def one_expert(self) -> nn.Module | None:
        """The module of one expert, if initial values are to be made expert by expert, as that module would.

        It has the parameters of the experts module under the same names; while they are being made, without the expert
        dimension. By default the experts module makes them itself, all experts at once.
        """
        return None

    @staticmethod
    def _of_experts(parameter: Tensor, groups: RowGroups) -> Tensor:
        """With the expert dimension on its own, where `parameter` is `[L * n, ...]`."""
        num_local = len(groups.counts)
        return parameter if parameter.shape[0] == num_local else parameter.unflatten(0, (num_local, -1))


def with_known_ids(
    adapter: ExpertsAdapter, top_k_index: Tensor, top_k_weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """The routing for the module's own forward: where that knows no such ids, some expert, weighed by nothing."""
    if adapter.knows_none:
        return top_k_index, top_k_weights
    none = (top_k_index < 0) | (top_k_index >= num_experts)
    return top_k_index.masked_fill(none, 0), top_k_weights.masked_fill(none, 0)


def local_parameter(module: nn.Module, name: str) -> Tensor:
    """This rank's part of a parameter, as a plain tensor."""
    owner, _, key = name.rpartition(".")
    parameter = getattr(module.get_submodule(owner), key)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def weigh(outputs: Tensor, weights: Tensor | None) -> Tensor:
    """`[R, H']` outputs, each row multiplied by its weight."""
    return outputs if weights is None else outputs * weights.to(outputs.dtype).unsqueeze(1)


Kind = TypeVar("Kind", bound=type[ExpertsAdapter])

_KINDS: list[type[ExpertsAdapter]] = []


def register_experts(kind: Kind) -> Kind:
    """Class decorator: the strategy asks this kind whether it knows a module, before all kinds registered earlier."""
    _KINDS.insert(0, kind)
    return kind


def adapter_for(module: nn.Module, around: Sequence[nn.Module]) -> ExpertsAdapter | None:
    """The adapter of the first kind that knows `module`."""
    return next((adapter for kind in _KINDS if (adapter := kind.match(module, around)) is not None), None)


def is_a(module: nn.Module, class_name: str) -> bool:
    """Whether the module's class, or one that it derives from, is called so: also in remote code and copies."""
    return any(base.__name__ == class_name for base in type(module).__mro__)
