"""The registry of dispatchers, and what each of them may ask of the device: one answer a forward, none a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_moe_ep import GroupedExperts, Layout, build_meshes, register_dispatcher
from lightning_moe_ep.dispatch import AllGatherDispatcher, Dispatcher, ExpertGroup, dispatcher_class
from lightning_moe_ep.dispatch.base import _DISPATCHERS
from lightning_moe_ep.experts import compute_experts
from lightning_moe_ep.rows import RowGroups
from tests import parity  # noqa: F401  (registers three_chunks, on the ranks too)
from tests.pool import RankPool


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^no dispatcher is named 'carrier_pigeon'; use one of \['all_gather'"):
        dispatcher_class("carrier_pigeon")


def test_a_name_is_taken_once() -> None:
    assert register_dispatcher("all_gather")(AllGatherDispatcher) is AllGatherDispatcher
    with pytest.raises(ValueError, match="the dispatcher name 'all_gather' is taken by AllGatherDispatcher"):

        @register_dispatcher("all_gather")
        class Other(AllGatherDispatcher):
            pass

    assert dispatcher_class("all_gather") is AllGatherDispatcher


# Host syncs. On a CPU nothing waits for the device, so the ranks below pretend: a tensor is on the host if a factory
# made it without being told a device, or if it was computed from such tensors; every other one is on the device.

FACTORIES = (torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange)
TO_HOST = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal"}
SIZE_UNKNOWN = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
ATEN = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}


class CountSyncs(TorchFunctionMode):
    """Names each question to the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self._hosts: dict[int, Tensor] = {}

    def is_host(self, tensor: Tensor) -> bool:
        return id(tensor) in self._hosts

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        from_host = all(map(self.is_host, tensors)) if tensors else function in FACTORIES and "device" not in kwargs
        if tensors and not from_host and self._asks(function, args, kwargs):
            self.syncs.append(function.__name__)
        known = function.__name__ in TO_HOST | SIZE_UNKNOWN or function.__name__ in ("__getitem__", "repeat_interleave")
        if known:
            result = function(*args, **kwargs)
        else:
            with CountHiddenSyncs(self.syncs):
                result = function(*args, **kwargs)
        if from_host and isinstance(result, Tensor):
            self._hosts[id(result)] = result
        return result

    @staticmethod
    def _asks(function: Callable, args: Any, kwargs: Any) -> bool:
        name = function.__name__
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(part, Tensor) and (part.dtype == torch.bool or part.ndim == 0) for part in index)
        if name == "repeat_interleave":
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
            return isinstance(repeats, Tensor) and kwargs.get("output_size") is None
        if name == "to":
            return any(isinstance(arg, str) and arg == "cpu" for arg in (*args, *kwargs.values()))
        if name in ("split", "tensor_split"):
            return any(isinstance(arg, Tensor) for arg in args[1:])
        return name in TO_HOST | SIZE_UNKNOWN


class CountHiddenSyncs(TorchDispatchMode):
    """The syncs inside of torch's functions, such as that of `one_hot` without a number of classes."""

    counts = True

    def __init__(self, syncs: list[str]) -> None:
        super().__init__()
        self.syncs = syncs

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        asks = name in ATEN
        if name == "index":
            asks = any(part is not None and part.dtype == torch.bool for part in args[1])
        if name == "repeat_interleave":
            asks = (kwargs or {}).get("output_size") is None
        if self.counts and asks:
            self.syncs.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def count_in_backward() -> Iterator[list[str]]:
    """Names each question to the device in a backward, which a function mode does not reach; all tensors count."""
    syncs: list[str] = []

    def counted(name: str, original: Callable) -> Callable:
        def method(*args: Any, **kwargs: Any) -> Any:
            syncs.append(name)
            with mock.patch.object(CountHiddenSyncs, "counts", False):
                return original(*args, **kwargs)

        return method

    with ExitStack() as stack:
        for name in TO_HOST & set(dir(Tensor)):
            stack.enter_context(mock.patch.object(Tensor, name, counted(name, getattr(Tensor, name))))
        stack.enter_context(CountHiddenSyncs(syncs))
        yield syncs


ASKING: dict[str, Callable[[Tensor], object]] = {
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool(t.sum() > 0),
    "int": lambda t: int(t[0]),
    "index": lambda t: range(5)[t[0]],
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 1),
    "boolean mask": lambda t: t[t > 1],
    "unique": lambda t: torch.unique(t),
    "repeat_interleave": lambda t: torch.repeat_interleave(t),
    "bincount": lambda t: torch.bincount(t),
    "one_hot": lambda t: torch.nn.functional.one_hot(t),
    "of new_empty": lambda t: t.new_zeros(3).tolist(),
    "of a factory with a device": lambda t: torch.zeros(3, device=t.device).tolist(),
    "of both": lambda t: (torch.arange(3) + t).tolist(),
}
SILENT: dict[str, Callable[[Tensor], object]] = {
    "host": lambda t: torch.tensor([1, 2]).max().item(),
    "host from host": lambda t: torch.empty(2).fill_(1).view(2, 1).tolist(),
    "shapes": lambda t: t.shape[0] + len(t),
    "permutation": lambda t: t[t.argsort()][1:],
    "nonzero_static": lambda t: torch.nonzero_static(t, size=3),
    "repeat_interleave of known size": lambda t: torch.repeat_interleave(t, output_size=3),
}


@pytest.mark.parametrize("name", ASKING)
def test_counter_sees_a_question(name: str) -> None:
    tensor = torch.tensor([0, 1, 2])
    with CountSyncs() as counter:
        ASKING[name](tensor)
    assert counter.syncs
    assert len(counter.syncs) == 1 or name == "one_hot"  # asks for the smallest and for the largest


@pytest.mark.parametrize("name", SILENT)
def test_counter_takes_nothing_else_for_one(name: str) -> None:
    tensor = torch.tensor([0, 1, 2])
    with CountSyncs() as counter:
        SILENT[name](tensor)
    assert counter.syncs == []


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ask: Callable[[Tensor], object]) -> Tensor:
        ctx.ask = ask
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.ask(torch.arange(grad.numel()))
        return grad, None


@pytest.mark.parametrize("name", [*ASKING, *SILENT])
def test_counter_of_backward(name: str) -> None:
    output = _AsksInBackward.apply(torch.ones(3, requires_grad=True), {**SILENT, **ASKING}[name]).sum()
    with count_in_backward() as syncs:
        output.backward()
    assert bool(syncs) == (name in ASKING or name.startswith("host"))


def _syncs(name: str, tokens: list[int]) -> tuple[list[str], list[str]]:
    """On a rank: the syncs of one layer's forward and backward."""
    layout = Layout.for_world(2, ep=2)
    meshes = build_meshes(layout, "cpu")
    group = ExpertGroup(group=meshes.ep_mesh.get_group(), host_group=meshes.host_ep_group, num_experts=8)
    dispatcher: Dispatcher = dispatcher_class(name)(group)
    local = GroupedExperts(16, 8, group.num_local)

    def experts(rows: Tensor, groups: RowGroups, weights: Tensor) -> Tensor:
        return compute_experts(local, rows, groups, weights, computation="grouped_mm")

    num_tokens = tokens[torch.distributed.get_rank()]
    hidden = torch.randn(num_tokens, 16, requires_grad=True)
    weights, index = torch.randn(num_tokens, 8, requires_grad=True).softmax(-1).topk(2)
    with CountSyncs() as forward:
        output = dispatcher(hidden, index, weights, experts)
    loss = (output * 2).sum()
    with count_in_backward() as backward:
        loss.backward()
    assert hidden.grad is not None and local.down_proj.grad is not None
    return forward.syncs, backward


@pytest.mark.parametrize("tokens", [[16, 16], [3, 8], [0, 5]], ids=str)
@pytest.mark.parametrize("name", sorted(_DISPATCHERS))
def test_one_host_sync_a_layer_and_none_in_backward(ranks: RankPool, name: str, tokens: list[int]) -> None:
    for forward, backward in ranks.run(_syncs, name, tokens, world=2):
        assert len(forward) <= 1, forward
        assert backward == []
