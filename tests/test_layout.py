"""The sizes of a layout: what is computed from them, and the words of every refusal."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch.distributed as dist

from lightning_moe_ep import Layout, MoEEPStrategy, build_meshes
from lightning_moe_ep.layout import divisors_of, largest_ep
from tests.pool import RankPool


def test_efsdp_and_fsdp_are_what_remains() -> None:
    layout = Layout.for_world(24, ep=4, replicate=2)
    assert (layout.replicate, layout.efsdp, layout.ep) == (2, 3, 4)
    assert (layout.fsdp, layout.world) == (12, 24)
    assert str(layout) == "(replicate 2, efsdp 3, ep 4)"


@pytest.mark.parametrize(("ep", "cp"), [(4, 2), (2, 4), (4, 4), (4, 3), (4, 6), (1, 12)])
def test_cp_is_a_factor_of_no_other_size(ep: int, cp: int) -> None:
    layout = Layout.for_world(12, ep=ep, cp=cp)
    assert (layout.efsdp, layout.world, layout.data_parallel) == (12 // ep, 12, 12 // cp)
    assert str(layout) == f"(replicate 1, efsdp {12 // ep}, ep {ep}, cp {cp})"


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (4, {"ep": 0}, "ep is 0, but must be at least 1"),
        (4, {"ep": -2}, "ep is -2, but must be at least 1"),
        (4, {"ep": 1, "replicate": 0}, "replicate is 0, but must be at least 1"),
        (0, {"ep": 1}, "world size is 0, but must be at least 1"),
        (
            2,
            {"ep": 4},
            r"ep=4 is larger than the world of 2 rank\(s\); use one of \[1, 2\], or more devices",
        ),
        (
            6,
            {"ep": 1, "replicate": 4},
            r"replicate=4 does not divide the world of 6 ranks; use one of \[1, 2, 3, 6\]",
        ),
        (
            6,
            {"ep": 4},
            r"ep=4 times replicate=1 does not divide the world of 6 ranks; with replicate=1, use an ep out of"
            r" \[1, 2, 3, 6\]",
        ),
        (
            8,
            {"ep": 8, "replicate": 2},
            r"ep=8 times replicate=2 does not divide the world of 8 ranks; with replicate=2, use an ep out of"
            r" \[1, 2, 4\]",
        ),
        (4, {"ep": 2, "cp": 0}, "cp is 0, but must be at least 1"),
        (
            4,
            {"ep": 2, "cp": 3},
            r"cp=3 does not divide the world of 4 rank\(s\): sequences are cut over cp consecutive ranks; use one of"
            r" \[1, 2, 4\]",
        ),
    ],
)
def test_refusal_gives_the_numbers_and_the_choices(world: int, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Layout.for_world(world, **sizes)


def test_refuses_experts_that_ep_does_not_divide() -> None:
    layout = Layout.for_world(4, ep=4)
    layout.check_experts({"blocks.0.experts": 8, "blocks.1.experts": 4})
    message = r"^ep=4 does not divide the 6 experts of blocks.1.experts; on 4 rank\(s\) use one of \[1, 2\]$"
    with pytest.raises(ValueError, match=message):
        layout.check_experts({"blocks.0.experts": 8, "blocks.1.experts": 6})


def test_divisors() -> None:
    assert divisors_of(12) == [1, 2, 3, 4, 6, 12]
    assert divisors_of(1) == [1]


@pytest.mark.parametrize(
    ("world", "replicate", "devices", "experts", "ep"),
    [
        (4, 1, 4, (8,), 4),
        (4, 1, 4, (6,), 2),
        (4, 1, 4, (8, 6), 2),  # every layer has a say
        (4, 1, 4, (7,), 1),
        (4, 2, 4, (8,), 2),
        (16, 1, 8, (128,), 8),  # not across nodes
        (12, 1, 8, (128,), 4),  # 6 divides the world, but not the experts
        (1, 1, 1, (8,), 1),
    ],
)
def test_largest_ep(world: int, replicate: int, devices: int, experts: tuple[int, ...], ep: int) -> None:
    counts = {f"layer {number}": count for number, count in enumerate(experts)}
    assert largest_ep(world, replicate=replicate, devices_per_node=devices, num_experts=counts) == ep


def test_largest_ep_refuses_replicas_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="replicate=3 does not divide the world of 4 ranks"):
        largest_ep(4, replicate=3, devices_per_node=4, num_experts={"experts": 8})


def _groups(layout: Layout) -> dict[str, list[int]]:
    meshes = build_meshes(layout, "cpu")
    groups = dict(meshes.groups())
    groups |= {"host": meshes.host_group, "host ep": meshes.host_ep_group}
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def test_ep_groups_are_consecutive_ranks(ranks: RankPool) -> None:
    found = ranks.run(_groups, Layout.for_world(4, ep=2), world=4)
    assert [of_rank["ep"] for of_rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [of_rank["host ep"] for of_rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [of_rank["efsdp"] for of_rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(of_rank["fsdp"] == of_rank["host"] == [0, 1, 2, 3] for of_rank in found)


def test_replicas_are_the_outermost(ranks: RankPool) -> None:
    found = ranks.run(_groups, Layout.for_world(4, ep=2, replicate=2), world=4)
    assert [of_rank["ep"] for of_rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [of_rank["replicate"] for of_rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [of_rank["fsdp"] for of_rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep": 4}, r"ep=4 is larger than the world of 2 rank\(s\); use one of \[1, 2\]"),
        ({"replicate": 3}, "replicate=3 does not divide the world of 2 ranks"),
        ({"ep": 2, "replicate": 2}, "ep=2 times replicate=2 does not divide the world of 2 ranks"),
        ({"ep": 2, "cp": 3}, r"cp=3 does not divide the world of 2 rank\(s\)"),
        ({"cp": 0}, "cp=0 must be a number of ranks, at least 1"),
    ],
)
def test_trainer_refuses_in_its_constructor(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        L.Trainer(devices=2, accelerator="cpu", strategy=MoEEPStrategy(**options), logger=False)
