"""What a dispatcher is, and the registry of them.

A dispatcher brings this rank's tokens to the ranks that hold their experts, has the experts there work on them, and
brings the weighted sum back. It knows tensors and process groups; how an expert computes is handed to it.

Shape letters: T tokens on this rank, H hidden size, K experts per token, E experts, L experts on this rank (E / ep),
R rows on this rank after the dispatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe_ep.rows import RoutingStatistics, RowGroups

CombineDtype = Literal["auto", "float32", "input"]
"""In which dtype experts' sums are sent: fp32, that of the activations, or what suits the dispatcher: `all_gather`,
where the network adds them up, uses fp32; `all_to_all`, where each row is rounded once, the activations'."""


class Experts(Protocol):
    """Runs this rank's experts."""

    def __call__(self, rows: Tensor, groups: RowGroups, weights: Tensor) -> Tensor:
        """From `[R, H]` rows sorted by expert, and their `[R]` weights, to `[R, H]` weighted outputs."""


@dataclass(frozen=True, kw_only=True)
class ExpertGroup:
    """What a dispatcher is told about the ep group and the experts module that it serves."""

    group: dist.ProcessGroup
    """The ep group, for tensors on the device."""

    host_group: dist.ProcessGroup
    """The same ranks, for host values."""

    num_experts: int
    """E, over the whole ep group."""

    combine_dtype: CombineDtype = "auto"

    statistics: RoutingStatistics = field(default_factory=RoutingStatistics)
    """What dispatchers count as they go."""

    equal_tokens: bool = False
    """The user's promise that T is the same on all ranks of the group in every forward."""

    @property
    def size(self) -> int:
        """ep."""
        return self.group.size()

    @property
    def num_local(self) -> int:
        """L."""
        return self.num_experts // self.size

    @property
    def first(self) -> int:
        """The global id of this rank's first expert."""
        return self.group.rank() * self.num_local

    def sum_dtype(self, automatic: torch.dtype, *, hidden: torch.dtype) -> torch.dtype:
        """The dtype in which experts' sums are sent, and the gradients of tokens with them.

        Args:
            automatic: what the dispatcher does by itself.
            hidden: the activations' dtype.
        """
        if self.combine_dtype == "float32":
            return torch.float32
        return automatic if self.combine_dtype == "auto" else hidden

    def agree_on_tokens(self, num_tokens: int) -> list[int]:
        """T of every rank of the group. Host values only: the device is not asked."""
        if self.equal_tokens:
            return [num_tokens] * self.size
        mine = torch.tensor([num_tokens])
        everyone = torch.empty(self.size, dtype=mine.dtype)
        dist.all_gather_single(everyone, mine, group=self.host_group)
        return everyone.tolist()


class Dispatcher(ABC):
    """Base of all dispatchers; one instance serves one experts module."""

    name: ClassVar[str]

    def __init__(self, expert_group: ExpertGroup) -> None:
        self.expert_group = expert_group

    @abstractmethod
    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: Experts) -> Tensor:
        """Send the tokens to their experts and bring the weighted sums back.

        Every rank of the group calls this the same number of times, also with no tokens.

        Args:
            hidden: `[T, H]`, this rank's tokens; T may be 0 and differ between ranks.
            top_k_index: `[T, K]` integers, global expert ids; one outside `[0, E)` chooses no expert.
            top_k_weights: `[T, K]`, the routing weights; their gradient is computed.
            experts: runs this rank's experts on rows sorted by expert.

        Returns:
            `[T, H]` in the dtype of `hidden`: for each token the weighted sum of its experts' outputs.
        """


_DISPATCHERS: dict[str, type[Dispatcher]] = {}


def register_dispatcher(name: str) -> Callable[[type[Dispatcher]], type[Dispatcher]]:
    """Class decorator that makes a dispatcher known as `name`.

    Raises:
        ValueError: another class is registered under this name.
    """

    def register(cls: type[Dispatcher]) -> type[Dispatcher]:
        if _DISPATCHERS.get(name, cls) is not cls:
            raise ValueError(f"the dispatcher name {name!r} is taken by {_DISPATCHERS[name].__qualname__}")
        cls.name = name
        _DISPATCHERS[name] = cls
        return cls

    return register


def dispatcher_class(name: str) -> type[Dispatcher]:
    """The dispatcher registered as `name`.

    Raises:
        ValueError: there is none; lists those that there are.
        NotImplementedError: "deep_ep".
    """
    if name == "deep_ep":
        raise NotImplementedError(
            "dispatcher='deep_ep' is not supported: DeepEP needs NVIDIA GPUs, which this version was not tried on;"
            f" use one of {sorted(_DISPATCHERS)}, or register a dispatcher of your own under another name"
        )
    if name not in _DISPATCHERS:
        raise ValueError(f"no dispatcher is named {name!r}; use one of {sorted(_DISPATCHERS)}")
    return _DISPATCHERS[name]
