"""Cutting a whole tensor and gathering it again, for every placement that the strategy makes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep import GroupedExperts, Layout, build_meshes, parallelize
from lightning_moe_ep.shards import cut, gather
from tests.pool import RankPool

LAYOUTS = {
    "ep 2": Layout.for_world(2, ep=2),
    "efsdp 2, ep 2": Layout.for_world(4, ep=2),
    "replicate 2, ep 2": Layout.for_world(4, ep=2, replicate=2),
    "efsdp 4": Layout.for_world(4, ep=1),
    "replicate 2, efsdp 2": Layout.for_world(4, ep=1, replicate=2),
}


class Model(nn.Module):
    """Experts, and dense weights whose first dimension a world of 4 does not divide."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = GroupedExperts(6, width, num_experts)
        self.dense = nn.Linear(3, 5)


def _there_and_back(layout: Layout, num_experts: int, width: int) -> dict[str, bool]:
    """For each parameter: that it is gathered whole, and that cutting another tensor gives that one's part."""
    model = Model(num_experts, width)
    parallelize(model, build_meshes(layout, "cpu"))
    same = {}
    for name, whole in Model(num_experts, width).named_parameters():
        parameter = model.get_parameter(name)
        gathered = gather(parameter)
        doubled = cut(whole.detach() * 2, parameter)
        assert doubled.placements == parameter.placements
        same[name] = torch.equal(doubled._local_tensor, parameter._local_tensor * 2)
        same[f"{name} whole"] = torch.equal(gathered, whole) if dist.get_rank() == 0 else gathered is None
    return same


@pytest.mark.parametrize(("num_experts", "width"), [(8, 4), (6, 4), (2, 4), (6, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_and_gather(ranks: RankPool, layout: str, num_experts: int, width: int) -> None:
    """Evenly, unevenly, with empty shards, and (6 experts of width 4 at efsdp 2) along the second dimension."""
    found = ranks.run(_there_and_back, LAYOUTS[layout], num_experts, width, world=LAYOUTS[layout].world)
    for of_rank in found:
        assert len(of_rank) == 8
        assert all(of_rank.values()), of_rank


def _gather_replicated() -> Tensor | None:
    return gather(torch.full((2,), float(dist.get_rank())))


def test_a_replicated_tensor_is_taken_from_rank_0(ranks: RankPool) -> None:
    first, second = ranks.run(_gather_replicated, world=2)
    assert first.tolist() == [0.0, 0.0] and second is None


def _cut_misfit() -> str:
    model = Model(2, 4)
    parallelize(model, build_meshes(Layout.for_world(2, ep=2), "cpu"))
    with pytest.raises(ValueError) as error:
        cut(torch.zeros(5, 4), model.dense.weight)
    return str(error.value)


def test_refuses_another_shape(ranks: RankPool) -> None:
    message = "a tensor of shape [5, 4] cannot fill one of shape [5, 3]"
    assert ranks.run(_cut_misfit, world=2) == [message] * 2


def _storage_of_cut() -> int:
    model = Model(8, 4)
    parallelize(model, build_meshes(Layout.for_world(2, ep=2), "cpu"))
    part = cut(torch.zeros(8, 8, 6), model.experts.gate_up_proj)
    return part._local_tensor.untyped_storage().nbytes()


def test_a_part_does_not_keep_the_whole(ranks: RankPool) -> None:
    assert ranks.run(_storage_of_cut, world=2) == [4 * 8 * 6 * 4] * 2
