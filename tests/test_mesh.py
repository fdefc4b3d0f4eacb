"""Meshes and groups on real ranks: that they are built once, checked, and usable by the host."""

from __future__ import annotations

import gc
import os
import signal
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_moe_ep import Layout, build_meshes
from lightning_moe_ep.mesh import forget_groups
from tests.forks import forked
from tests.pool import RankPool

LAYOUT = Layout.for_world(4, ep=2)


def _twice() -> tuple[bool, bool]:
    first = build_meshes(LAYOUT, "cpu")
    other = build_meshes(Layout.for_world(4, ep=4), "cpu")
    return build_meshes(Layout.for_world(4, ep=2), "cpu") is first, other is first


def test_same_layout_gives_the_same_meshes(ranks: RankPool) -> None:
    assert ranks.run(_twice, world=4) == [(True, False)] * 4
    # The next world's groups are others: what is left of the last one must not be handed out.
    assert ranks.run(_sum_over_host_ep_group, world=4) == [1, 1, 5, 5]


def _sum_over_host_ep_group() -> int:
    mine = torch.tensor(dist.get_rank())
    dist.all_reduce(mine, group=build_meshes(LAYOUT, "cpu").host_ep_group)
    return int(mine)


def test_host_ep_group_carries_cpu_tensors_of_its_ranks_only(ranks: RankPool) -> None:
    assert ranks.run(_sum_over_host_ep_group, world=4) == [1, 1, 5, 5]


def _timeouts() -> list[str]:
    """On a rank: the groups, each with how many seconds a collective over it may take."""
    meshes = build_meshes(LAYOUT, "cpu", timeout=timedelta(seconds=11))
    groups = [*meshes.groups(), ("host", meshes.host_group), ("host ep", meshes.host_ep_group)]
    backends = [(name, group._get_backend(torch.device("cpu"))) for name, group in groups]
    return [f"{name} {backend.options._timeout.total_seconds():.0f}" for name, backend in backends]


def test_every_group_has_the_timeout(ranks: RankPool) -> None:
    assert ranks.run(_timeouts, world=4) == [["fsdp 11", "efsdp 11", "ep 11", "host 11", "host ep 11"]] * 4


def _host_group_of_nccl() -> list[str | None]:
    """The backends that new groups are asked for when the default one is NCCL."""
    asked: list[str | None] = []
    new_group = dist.new_group

    def record(group_ranks: list[int], backend: str | None = None) -> object:
        asked.append(backend)
        return new_group(group_ranks, backend=backend)

    with mock.patch.object(dist, "get_backend", return_value="nccl"), mock.patch.object(dist, "new_group", record):
        build_meshes(LAYOUT, "cpu")
    return asked


def test_host_groups_are_gloo_beside_nccl(ranks: RankPool) -> None:
    for asked in ranks.run(_host_group_of_nccl, world=4):
        assert asked[-3:] == ["gloo"] * 3  # two ep groups and the world


def _ep1() -> list[str]:
    meshes = build_meshes(Layout.for_world(2, ep=1), "cpu")
    assert meshes.expert is None and meshes.host_ep_group is None
    messages = []
    for name in ("ep_mesh", "efsdp_mesh", "cp_mesh"):
        with pytest.raises(RuntimeError) as error:
            getattr(meshes, name)
        messages.append(str(error.value))
    return [*messages, *dict(meshes.groups())]


def test_ep_1_has_no_expert_view(ranks: RankPool) -> None:
    answers = ["there is no ep mesh at ep=1", "there is no efsdp mesh at ep=1: FSDP2 uses the dense mesh"]
    answers += ["there is no cp mesh at cp=1", "fsdp"]
    assert ranks.run(_ep1, world=2) == [answers] * 2


def _cp_beside_ep() -> tuple[int, int, list[str]]:
    meshes = build_meshes(Layout.for_world(4, ep=4, cp=2), "cpu")
    assert meshes.host_cp_group is not None and meshes.host_cp_group in meshes.all_groups
    mine = torch.tensor(dist.get_rank())
    dist.all_reduce(mine, group=meshes.host_cp_group)
    assert dist.get_process_group_ranks(meshes.cp_mesh.get_group()) == dist.get_process_group_ranks(
        meshes.host_cp_group
    )
    return int(mine), meshes.cp_rank, [*dict(meshes.groups())]


def test_cp_groups_are_consecutive_ranks_whatever_ep_is(ranks: RankPool) -> None:
    names = ["fsdp", "efsdp", "ep", "dp", "cp"]
    assert ranks.run(_cp_beside_ep, world=4) == [(1, 0, names), (1, 1, names), (5, 0, names), (5, 1, names)]


def _failing_collective(how: str, size: int) -> str:
    """The error when the all-reduce over groups of `size` ranks fails, by an exception or by a wrong sum."""
    all_reduce = dist.all_reduce

    def broken(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        all_reduce(tensor, group=group)
        if group.size() == size and how == "raise":
            raise RuntimeError("connection reset by peer")
        if group.size() == size:
            tensor += 5

    with mock.patch.object(dist, "all_reduce", broken), pytest.raises(RuntimeError) as error:
        build_meshes(LAYOUT, "cpu")
    return str(error.value)


def test_failing_collective_names_the_group_and_its_ranks(ranks: RankPool) -> None:
    # The efsdp groups, of two ranks, are the first that are not the world.
    for rank, message in enumerate(ranks.run(_failing_collective, "raise", 2, world=4)):
        assert f"the 'efsdp' group of ranks {[rank % 2, rank % 2 + 2]} failed on rank {rank}" in message
        assert "check the network between these ranks (connection reset by peer)" in message


def test_wrong_sum_names_the_group_and_its_ranks(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks.run(_failing_collective, "sum", 4, world=4)):
        assert f"the 'fsdp' group of ranks [0, 1, 2, 3] gave 9 instead of 4 on rank {rank}" in message


def _misfit() -> str:
    with pytest.raises(ValueError) as error:
        build_meshes(LAYOUT, "cpu")
    return str(error.value)


def test_refuses_a_layout_of_another_world(ranks: RankPool) -> None:
    message = "the layout (replicate 1, efsdp 2, ep 2) is for 4 ranks, but the world has 2"
    assert ranks.run(_misfit, world=2) == [message] * 2


def test_refuses_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="needs an initialised process group"):
        build_meshes(LAYOUT, "cpu")


def _forked_after_groups_are_gone(folder: Path) -> int:
    """The exit status of a process forked from one that had groups; it is a rank of another world."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'first'}", rank=0, world_size=1)
    build_meshes(Layout.for_world(1, ep=1), "cpu")
    circle: list[object] = [dist.new_group([0])]
    circle.append(circle)
    dist.destroy_process_group()
    del circle
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        forget_groups()
        gc.collect()
        dist.init_process_group("gloo", init_method=f"file://{folder / 'second'}", rank=0, world_size=1)
        build_meshes(Layout.for_world(1, ep=1), "cpu")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_groups_of_a_parent_are_not_waited_for(tmp_path: Path) -> None:
    assert forked(_forked_after_groups_are_gone, tmp_path) == 0
