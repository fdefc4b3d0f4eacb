"""Routers are found beside their experts, by their shapes and by what they say of themselves."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_moe_ep import GroupedExperts, Layout, build_meshes, parallelize
from lightning_moe_ep.experts import NoExpertsError, find_routers
from tests.families.find import families
from tests.families.tiny import tiny_model
from tests.models import build
from tests.pool import RankPool

REFUSED = {"nllb-moe", "switch_transformers"}
"""Families whose experts are refused."""


def names_of(model: nn.Module) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    return {experts: names[router] for experts, router in find_routers(model).items()}


@pytest.mark.parametrize("family", [family for family in families() if family not in REFUSED])
def test_every_family(family: str) -> None:
    model = tiny_model(family)
    found = find_routers(model)
    assert found
    for router in found.values():
        assert any(word in type(router).__name__ for word in ("Router", "Gat"))


def _names_when_parallel() -> dict[str, str]:
    model = build("qwen3_moe")
    parallelize(model, build_meshes(Layout.for_world(2, ep=2), "cpu"))
    return names_of(model)


def test_before_and_after_it_is_parallel(ranks: RankPool) -> None:
    right = {f"model.layers.{layer}.mlp.experts": f"model.layers.{layer}.mlp.gate" for layer in (0, 1)}
    assert names_of(build("qwen3_moe")) == right
    assert ranks.run(_names_when_parallel, world=2) == [right] * 2


class Router(nn.Module):
    def __init__(self, rows: int, **says: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, rows)
        for name, value in says.items():
            setattr(self, name, value)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)


def _layer(**beside: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"experts": GroupedExperts(4, 6, 3), **beside})])})


@pytest.mark.parametrize(
    ("beside", "router"),
    [
        ({"norm": nn.LayerNorm(3), "gate": Router(3)}, "gate"),
        ({"gate": Router(5, num_experts=3), "shared": nn.Linear(4, 6)}, "gate"),  # two rows more, as in longcat_flash
        ({"mlp": nn.Linear(4, 3), "gate": Router(3, n_experts=3)}, "gate"),
        ({"mlp": nn.Linear(4, 3, bias=False), "gate": Router(3)}, "gate"),  # it has a [E] too
        ({"wide": nn.Linear(8, 3), "gate": Router(3)}, "gate"),
    ],
    ids=["not a vector alone", "by what it says", "by what it says too", "by its bias", "the smaller"],
)
def test_signs(beside: dict[str, nn.Module], router: str) -> None:
    assert names_of(_layer(**beside)) == {"layers.0.experts": f"layers.0.{router}"}


def test_there_is_none() -> None:
    with pytest.raises(
        ValueError,
        match=r"no router was found around the 3 experts of layers.0.experts: no module beside them owns a parameter"
        r" \[3, ...\] of two dimensions or says, in an attribute with 'expert' in its name, that they are 3$",
    ):
        find_routers(_layer(norm=nn.LayerNorm(3), mlp=nn.Linear(4, 5)))
    with pytest.raises(NoExpertsError):
        find_routers(nn.Linear(2, 2))
