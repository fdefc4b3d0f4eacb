"""The norm of sharded, replicated, missing and empty gradients, against one flat vector in one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.harness import counted
from lightning_moe_ep.gradients import average_gradients, clip_by_norm, gradient_norm, scale_gradients
from tests.pool import RankPool

CPU = torch.device("cpu")
NORM_TYPES = [1.0, 2.0, 3.0, math.inf]


def _parameter(local: Tensor, mesh: object, placements: list, shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter whose gradient is `local` on this rank."""

    def distributed(tensor: Tensor) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    parameter = nn.Parameter(distributed(torch.zeros_like(local)))
    parameter.grad = distributed(local)
    return parameter


def _plain(grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad.clone()
    return parameter


def _norm(parts: dict[str, list[nn.Parameter]], norm_type: float) -> dict[str, float]:
    norm = gradient_norm(parts, norm_type=norm_type, group=dist.group.WORLD, device=CPU)
    assert norm.total.dtype == torch.float32 and norm.total.ndim == 0
    return {"total": float(norm.total), **{name: float(value) for name, value in norm.parts.items()}}


def _nothing(norm_type: float) -> dict[str, float]:
    return _norm({"dense": [nn.Parameter(torch.ones(3))], "experts": []}, norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_no_gradient_at_all(ranks: RankPool, norm_type: float) -> None:
    assert ranks.run(_nothing, norm_type, world=2) == [{"total": 0.0, "dense": 0.0, "experts": 0.0}] * 2


def _nan_on(rank: int, norm_type: float) -> dict[str, float]:
    grad = torch.tensor([math.nan if dist.get_rank() == rank else 1.0, -2.0])
    mesh = init_device_mesh("cpu", (4,))
    return _norm({"dense": [_plain(torch.ones(1))], "experts": [_parameter(grad, mesh, [Shard(0)], (8,))]}, norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("rank", range(4))
def test_nan_on_one_rank_is_seen_on_all(ranks: RankPool, rank: int, norm_type: float) -> None:
    for norm in ranks.run(_nan_on, rank, norm_type, world=4):
        assert math.isnan(norm["total"]) and math.isnan(norm["experts"])
        assert norm["dense"] == 1.0


def _one_shard(norm_type: float) -> dict[str, float]:
    """A gradient of one row over two ranks: rank 1 holds none of it."""
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.tensor([[3.0, -4.0]])[: 1 - dist.get_rank()]
    return _norm({"dense": [], "experts": [_parameter(rows, mesh, [Shard(0)], (1, 2))]}, norm_type)


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 7.0), (2.0, 5.0), (3.0, 91 ** (1 / 3)), (math.inf, 4.0)])
def test_only_one_rank_holds_anything(ranks: RankPool, norm_type: float, norm: float) -> None:
    for found in ranks.run(_one_shard, norm_type, world=2):
        assert found == pytest.approx({"total": norm, "dense": 0.0, "experts": norm}, rel=1e-6)


def _gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"sharded": (8, 3), "hybrid": (4, 5), "experts": (8, 2, 2), "whole": (7,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _mixed(norm_type: float) -> dict[str, float]:
    """On 4 ranks: sharded over all, sharded and replicated, sharded twice, and whole on each."""
    rank = dist.get_rank()
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    grads = _gradients()
    dense = [
        _parameter(grads["sharded"].chunk(4)[rank].clone(), flat, [Shard(0)], (8, 3)),
        _parameter(grads["hybrid"].chunk(2)[rank % 2].clone(), square, [Replicate(), Shard(0)], (4, 5)),
        _plain(grads["whole"]),
        nn.Parameter(torch.ones(2)),  # without a gradient
    ]
    experts = [_parameter(grads["experts"].chunk(4)[rank].clone(), square, [Shard(0), Shard(0)], (8, 2, 2))]
    before = _norm({"dense": dense, "experts": experts}, norm_type)
    total = torch.tensor(before["total"])
    clip_by_norm([*dense, *experts], total=total, max_norm=0.5)
    after = _norm({"dense": dense, "experts": experts}, norm_type)
    return {**before, "clipped": after["total"]}


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_equals_the_norm_of_one_flat_vector(ranks: RankPool, norm_type: float) -> None:
    grads = {name: grad.double().flatten() for name, grad in _gradients().items()}
    experts = grads.pop("experts")
    dense = torch.cat(list(grads.values()))
    right = {
        "total": float(torch.cat([dense, experts]).norm(norm_type)),
        "dense": float(dense.norm(norm_type)),
        "experts": float(experts.norm(norm_type)),
        "clipped": 0.5,
    }
    found = ranks.run(_mixed, norm_type, world=4)
    assert all(of_rank == found[0] for of_rank in found)
    assert found[0] == pytest.approx(right, rel=1e-5)


def _bf16() -> float:
    """2^14 ones of 1/128 and one 1: in bf16 the small ones would be lost beside the large one."""
    grad = torch.full((2**14 + 1,), 1 / 128, dtype=torch.bfloat16)
    grad[0] = 1
    return _norm({"dense": [_plain(grad)]}, 2.0)["total"]


def test_bf16_gradients_are_summed_in_fp32(ranks: RankPool) -> None:
    assert ranks.run(_bf16, world=2) == pytest.approx([math.sqrt(2)] * 2, rel=1e-6)


def test_refuses_a_norm_type_that_is_none() -> None:
    for norm_type in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"norm_type={norm_type} must be positive, or inf"):
            gradient_norm({}, norm_type=norm_type, group=None, device=CPU)


def test_clip_leaves_small_gradients_alone() -> None:
    parameter = _plain(torch.tensor([3.0, 4.0]))
    clip_by_norm([parameter], total=torch.tensor(5.0), max_norm=6.0)
    assert parameter.grad.tolist() == [3.0, 4.0]
    clip_by_norm([parameter], total=torch.tensor(5.0), max_norm=2.5)
    torch.testing.assert_close(parameter.grad, torch.tensor([1.5, 2.0]))


def test_scale_passes_over_missing_gradients() -> None:
    with_grad, without = _plain(torch.ones(2)), nn.Parameter(torch.ones(2))
    scale_gradients([with_grad, without], 0.25)
    assert with_grad.grad.tolist() == [0.25, 0.25] and without.grad is None


def _averages() -> list[list[float]]:
    rank = dist.get_rank()
    here, everywhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    if rank == 0:
        here.grad = torch.tensor([2.0, 4.0])
    everywhere.grad = torch.tensor([float(rank)], dtype=torch.bfloat16)
    for _ in range(2):  # averaging again changes nothing
        average_gradients([here, everywhere], dist.group.WORLD)
    average_gradients([], dist.group.WORLD)
    return [here.grad.tolist(), everywhere.grad.tolist()]


def test_average_counts_a_missing_gradient_as_zero(ranks: RankPool) -> None:
    assert ranks.run(_averages, world=2) == [[[1.0, 2.0], [0.5]]] * 2


def _syncs_of_norm_and_clip() -> int:
    """On a rank: how often the norm, the scaling and the clip ask the device."""
    parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(4, 3)
    with counted() as counts:
        scale_gradients(parameters, 0.5)
        norm = gradient_norm(
            {"dense": parameters[:2], "experts": parameters[2:]},
            norm_type=2.0,
            group=dist.group.WORLD,
            device=torch.device("cpu"),
        )
        clip_by_norm(parameters, total=norm.total, max_norm=0.1)
    assert counts.messages == 1
    return counts.host_syncs


def test_norm_and_clip_ask_the_device_for_nothing(ranks: RankPool) -> None:
    assert ranks.run(_syncs_of_norm_and_clip, world=2) == [0, 0]
