"""Which ModuleLists are taken for experts, which are refused and in what words, and which are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe_ep import Layout, build_meshes, parallelize
from lightning_moe_ep.experts import NoExpertsError, find_experts
from lightning_moe_ep.experts.module_list import ModuleListExperts
from tests.list_models import BLOCKS, HIDDEN, GatedMLP, Holder, MixtralBlock, ScaledMLP
from tests.models import build
from tests.pool import RankPool


class Block(nn.Module):
    """A list of members, by a name, beside a router."""

    def __init__(self, members: list[Any], name: str = "experts", router: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, len(members)) if router is None else router
        setattr(self, name, nn.ModuleList(members))


def _mlps(number: int = 4, **options: Any) -> list[nn.Module]:
    return [GatedMLP(HIDDEN, 16, False, **options) for _ in range(number)]


def _changed(change: Callable[[nn.Module], object], make: Callable[[], list[nn.Module]] = _mlps) -> list[nn.Module]:
    """With a change to member 2."""
    members = make()
    change(members[2])
    return members


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_finds_the_lists(kind: str, device: str) -> None:
    with torch.device(device):
        model = build(kind)
    found = find_experts(model)
    assert [(type(each.adapter), each.num_experts) for each in found] == [(ModuleListExperts, 8)] * 2
    assert [each.name for each in found] == [f"blocks.{number}.moe.experts" for number in range(2)]
    assert list(found[0].adapter.parameters) == [name for name, _ in found[0].module[0].named_parameters()]
    computations = {"auto", "loop"} if kind == "own_list_scaled" else {"auto", "loop", "grouped_mm"}
    assert found[0].adapter.computations == computations


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(HIDDEN, 3))


class Routed(nn.Module):
    """With a router several modules down, of the other orientation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"router": nn.Sequential(nn.LayerNorm(HIDDEN), Plain())})


@pytest.mark.parametrize(
    "members",
    [
        [nn.Linear(HIDDEN, HIDDEN) for _ in range(3)],
        [nn.Sequential(nn.Linear(HIDDEN, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 2)) for _ in range(3)],
        [ScaledMLP(HIDDEN, 8, True) for _ in range(3)],
        _mlps(3),
    ],
    ids=["Linear", "Sequential", "own parameters", "MLP"],
)
def test_what_is_an_mlp(members: list[nn.Module]) -> None:
    """Whatever the names."""
    for router in (None, Routed()):
        (found,) = find_experts(nn.ModuleDict({"a": nn.Sequential(Block(members, "specialists", router))}))
        assert (found.name, found.num_experts) == ("a.0.specialists", 3)


def test_a_router_beside_the_module_that_holds_the_list() -> None:
    (found,) = find_experts(nn.ModuleDict({"experts": Holder(4, 16), "router": nn.Linear(HIDDEN, 4)}))
    assert found.name == "experts.mlps"


class Attention(nn.Module):
    """A transformer's layer with as few names as can be."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN) if norm else nn.Identity()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)).view(b, t, c)


def _layers(kind: str) -> list[nn.Module]:
    if kind == "torch":
        return [nn.TransformerEncoderLayer(HIDDEN, 4, 32) for _ in range(4)]
    if kind == "transformers":
        return list(build("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3]).model.layers)
    return [Attention(kind == "with norms") for _ in range(4)]


@pytest.mark.parametrize("kind", ["torch", "transformers", "with norms", "without norms"])
def test_layers_of_a_transformer_are_no_experts(kind: str) -> None:
    """Also with as many classes as layers."""
    with pytest.raises(NoExpertsError):
        find_experts(Block(_layers(kind), "layers"))


def test_layers_with_experts_inside_are_no_experts() -> None:
    model = Block([MixtralBlock(8, 2, 16, False) for _ in range(4)], "layers")
    assert [found.name for found in find_experts(model)] == [f"layers.{number}.experts" for number in range(4)]


class Buffered(GatedMLP):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.ones(()))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.T).T


class Weighted(GatedMLP):
    def forward(self, hidden_states: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_states) * weights


class Identified(GatedMLP):
    def __init__(self, number: int) -> None:
        super().__init__(HIDDEN, 16, False)
        self.number = number


def _tied() -> list[nn.Module]:
    members = _mlps()
    members[3].w1.weight = members[1].w1.weight
    return members


class Subclass(GatedMLP):
    pass


REFUSED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "another class": (lambda: [*_mlps(3), Subclass(HIDDEN, 16, False)], "member 3 is a Subclass, the first a GatedMLP"),
    "another width": (
        lambda: [*_mlps(2), GatedMLP(HIDDEN, 24, False), *_mlps(1)],
        "member 2 has w1.weight: [24, 64] in torch.float32, the first [16, 64] in torch.float32",
    ),
    "another dtype": (
        lambda: _changed(lambda member: member.w2.bfloat16()),
        "member 2 has w2.weight: [64, 16] in torch.bfloat16, the first [64, 16] in torch.float32",
    ),
    "one that is frozen": (
        lambda: _changed(lambda member: member.w3.requires_grad_(False)),
        "member 2 has w3.weight: [16, 64] in torch.float32, frozen, the first [16, 64] in torch.float32",
    ),
    "one more parameter": (
        lambda: _changed(lambda member: setattr(member, "extra", nn.Parameter(torch.zeros(2)))),
        "member 2 has extra: [2] in torch.float32, the first no such parameter",
    ),
    "another activation": (
        lambda: _changed(lambda member: setattr(member, "act_fn", nn.GELU())),
        "member 2 has act_fn: a GELU, the first a SiLU",
    ),
    "another function": (
        lambda: _changed(
            lambda member: setattr(member, "act_fn", F.gelu), lambda: [_with_function() for _ in range(4)]
        ),
        "member 2 has act_fn=<built-in function gelu>, the first <function silu",
    ),
    "a number of its own": (lambda: [Identified(n) for n in range(4)], "member 1 has number=1, the first 0"),
    "none": (lambda: [None, None, *_mlps(2)], "member 0 is None (was the list built for another expert parallelism?)"),
    "a buffer": (
        lambda: [Buffered(HIDDEN, 16, False) for _ in range(4)],
        "a Buffered has the buffer scale, which cannot be told from one to another expert",
    ),
    "a convolution": (lambda: [Convolved() for _ in range(4)], "conv of a Convolved is a Conv1d, no Linear"),
    "shared parameters": (_tied, "members share parameters with each other or with the rest of the model"),
    "another call": (
        lambda: [Weighted(HIDDEN, 16, False) for _ in range(4)],
        "a Weighted is no MLP: called with rows [5, 64] it raises TypeError: Weighted.forward() missing 1 required",
    ),
    "another input": (
        lambda: [GatedMLP(32, 16, False) for _ in range(4)],
        "a GatedMLP is no MLP: called with rows [5, 64] it raises RuntimeError",
    ),
}


def _with_function() -> nn.Module:
    member = GatedMLP(HIDDEN, 16, False)
    del member.act_fn
    member.act_fn = F.silu
    return member


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(NotImplementedError) as error:
        find_experts(nn.ModuleDict({"mlp": Block(make())}))
    message = str(error.value)
    assert message.startswith(
        "the experts module mlp.experts (ModuleList) is a ModuleList of 4 beside a router's weight of width 64, but not"
        f" of equal MLPs, which alone are stacked: {words}"
    )
    assert message.endswith(". Make its members equal MLPs, or describe it with register_experts")
    with pytest.raises(NoExpertsError):  # by another name it is some list of modules
        find_experts(nn.ModuleDict({"mlp": Block(make(), "towers")}))


def test_a_list_without_a_router_came_near() -> None:
    with pytest.raises(NoExpertsError) as error:
        find_experts(nn.ModuleDict({"mlp": Block(_mlps(), router=nn.Linear(HIDDEN, 5))}))
    message = str(error.value)
    assert message.endswith(
        "What came near: mlp.experts (ModuleList): no router's weight [4, H] is beside its 4 members"
    )
    assert (
        "or is a ModuleList of equal MLPs with a router's weight [E, H] beside it; one of another kind can" in message
    )


def test_frozen_experts_stay_frozen(ranks: RankPool) -> None:
    assert ranks.run(_frozen, world=2) == [[False, True]] * 2


def _frozen() -> list[bool]:
    block = MixtralBlock(4, 2, 16, False)
    block.experts.requires_grad_(False)
    parallelize(block, build_meshes(Layout.for_world(2, ep=2), "cpu"))
    block(torch.randn(6, HIDDEN)).sum().backward()
    assert block.experts.w1.weight.grad is None
    return [block.experts.w1.weight.requires_grad, block.gate.weight.requires_grad]


def _again() -> list[str]:
    block = MixtralBlock(4, 2, 16, False)
    meshes = build_meshes(Layout.for_world(2, ep=2), "cpu")
    told = []
    for options in ({"computation": "native"}, {}, {}):
        try:
            parallelize(block, meshes, **options)
        except ValueError as error:
            told.append(str(error))
    return told


def test_parallelizing_twice(ranks: RankPool) -> None:
    for native, again in ranks.run(_again, world=2):
        assert native.startswith("computation='native' is not known to the experts of experts (ModuleList); use one of")
        assert again == "the experts of experts are spread already; parallelize a model once"


def _sizes() -> str:
    block = MixtralBlock(4, 2, 5, False)
    parallelize(block, build_meshes(Layout.for_world(2, ep=2), "cpu"), computation="grouped_mm")
    with pytest.raises(ValueError) as error:
        block(torch.randn(6, HIDDEN))
    return str(error.value)


def test_sizes_that_grouped_mm_does_not_take(ranks: RankPool) -> None:
    for told in ranks.run(_sizes, world=2):
        assert told == (
            "grouped_mm takes sizes that fill multiples of 16 bytes, but w1.weight out=5, w1.weight in=64, w2.weight"
            " out=64, w2.weight in=5, w3.weight out=5, w3.weight in=64 in torch.float32 do not; use computation='loop'"
            " or 'auto'"
        )
