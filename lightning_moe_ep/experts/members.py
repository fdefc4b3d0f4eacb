"""Many equal modules in one: what stands in a model in place of a ModuleList of experts.

Its tree is that of one member, with parameters `[E, ...]`; it still counts, gives out and iterates over its members as
the list did. What a call of a member does is decided by whoever runs the code that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from typing_extensions import override

from lightning_moe_ep.experts.adapter import ExpertsAdapter

Answer = Callable[..., Any]
"""What a call of a member comes to: from its number and what it was called with."""


class StackedMembers(nn.Module):
    """The members of a ModuleList as one module; `model.experts[3](rows)` goes on working in the code around."""

    def __init__(
        self, member: nn.Module, num_members: int, *, widths: tuple[int, int], adapter: ExpertsAdapter
    ) -> None:
        """
        Args:
            member: the tree of one member, with parameters `[num_members, ...]`.
            num_members: E.
            widths: of what a member takes and gives.
            adapter: what serves it.
        """
        super().__init__()
        # The same dictionaries, so that what becomes of a parameter here is seen there.
        self._parameters, self._buffers, self._modules = member._parameters, member._buffers, member._modules
        self.__dict__["_member"] = member  # not a child: the children of both are the same
        self._num_members, self._widths, self._adapter = num_members, widths, adapter
        self._answer: Answer | None = None

    @property
    def member(self) -> nn.Module:
        """The tree of one member."""
        return self.__dict__["_member"]

    @property
    def width_in(self) -> int:
        """Of what a member takes."""
        return self._widths[0]

    @property
    def width_out(self) -> int:
        """Of what a member gives."""
        return self._widths[1]

    @property
    def adapter(self) -> ExpertsAdapter:
        """What serves these experts."""
        return self._adapter

    def run(self, parameters: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call the member's own forward with other parameters than the stacked ones."""
        self.member.training = self.training
        return functional_call(self.member, dict(parameters), args, kwargs)

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Inside, `answer` is called for each call of a member."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before

    def __len__(self) -> int:
        return self._num_members

    def __getitem__(self, index: Any) -> Any:
        members = range(self._num_members)[index]  # as a list: slices, negative ones, tensors of one integer
        return Member(self, members) if isinstance(members, int) else [Member(self, number) for number in members]

    def __iter__(self) -> Iterator[Member]:
        return (Member(self, number) for number in range(self._num_members))

    @override
    def extra_repr(self) -> str:
        return f"{self._num_members} x {type(self.member).__name__}"


class Member:
    """One member as the code around sees it: it can be called; all else is the stacked tree's."""

    def __init__(self, members: StackedMembers, number: int) -> None:
        self._members, self._number = members, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._members._answer is None:
            raise RuntimeError(
                f"an expert ({type(self._members.member).__name__}) was called outside of the forward of the module"
                " that holds the list of experts; only calls from inside it (not from a checkpoint around a single"
                " expert, either) reach experts on other ranks"
            )
        return self._members._answer(self._number, *args, **kwargs)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        if name in ("_members", "_number"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._members.member, name)


def with_tie(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """`tensor`, and a zero of no dimensions by which backward comes to it even if nothing else of it is used.

    A backward that comes to the second alone gives the tensor a gradient of zeros, and so has the collectives behind
    it run on every rank; the parts of the first that are used have theirs as ever.
    """
    return _WithTie.apply(tensor)


class _WithTie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor.view_as(tensor), tensor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad  # of zeros where there is none
