"""Ranks whose batches go different ways through a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep import Layout, build_meshes, parallelize
from tests.families.sweep import compare
from tests.models import HIDDEN, Block
from tests.pool import RankPool


def _blocks() -> nn.ModuleList:
    return nn.ModuleList([Block(num_experts=4, top_k=2, intermediate_size=16) for _ in range(2)])


class TwoTowers(nn.Module):
    """Experts in both of two lists of layers, of which a batch may leave the first out."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.text = _blocks(), _blocks()

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        if image is not None:
            for block in self.images:
                image = block(image)
            text = torch.cat([text, image])
        for block in self.text:
            text = block(text)
        return text


class UnusedParts(nn.Module):
    """A tower without experts: one part is used without being called, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Module()
        self.tower.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])
        self.tower.table = nn.Embedding(3, HIDDEN)
        self.tower.spare = nn.Linear(HIDDEN, HIDDEN)
        self.tower.forward = self._through_tower
        self.text = _blocks()

    def _through_tower(self, image: Tensor) -> Tensor:
        return self.tower.layers[0](image) + self.tower.table.weight[1]

    def forward(self, text: Tensor, image: Tensor | None = None) -> dict[str, Tensor]:
        hidden = text if image is None else text + self.tower(image)
        for block in self.text:
            hidden = block(hidden)
        return {"hidden": hidden}


def _tokens(seed: int) -> Tensor:
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(seed))


def _two_towers(with_images: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    model = TwoTowers()
    parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=2), "cpu"))
    image = _tokens(1) if dist.get_rank() in with_images else None
    try:
        model(_tokens(0), image).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def _unused_parts() -> list[str]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return UnusedParts()

    rank = dist.get_rank()
    image = _tokens(10) if rank == 1 else None
    return compare(build, lambda model: model(_tokens(rank), image)["hidden"].pow(2).mean(), ep=2)


@pytest.mark.parametrize("with_images", [(), (0, 1)], ids=str)
def test_two_towers_go_together(ranks: RankPool, with_images: tuple[int, ...]) -> None:
    assert ranks.run(_two_towers, with_images, world=2) == ["", ""]


def test_two_towers_apart_are_refused_on_every_rank(ranks: RankPool) -> None:
    message = (
        "rank(s) [1] came to images.0 but rank(s) [0] came to text.0: each batch has to go through every list of layers"
        " with experts, or none may; give each rank an input for all of them (an image, say), or leave it out on all"
        " ranks"
    )
    assert ranks.run(_two_towers, (1,), world=2) == [message] * 2


def test_parts_that_are_used_without_a_call_or_never(ranks: RankPool) -> None:
    assert ranks.run(_unused_parts, world=2)[0] == []
