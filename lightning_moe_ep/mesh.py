"""From a `Layout` to device meshes and process groups.

One world, seen twice: the dense view `(replicate, fsdp)` shards everything but the experts, the expert view
`(replicate, efsdp, ep)` shards the experts. Dimensions that are not used (`replicate` of 1, the whole expert view at
`ep=1`) are left out. Beside them, at `cp > 1`, the data view `(dp, cp)`, which shards nothing but sequences. A
`Meshes` comes out, whose groups have each carried one collective, so that a broken network shows here and not inside
the first backward.
"""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Private; read at torch 2.13.0. A test fails when they move.
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout, _update_default_pg, _world
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_moe_ep.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """The process groups of one layout."""

    layout: Layout

    dense: DeviceMesh
    """`(fsdp,)`, or `(replicate, fsdp)` when there are replicas."""

    expert: DeviceMesh | None
    """`(efsdp, ep)`, or `(replicate, efsdp, ep)` when there are replicas; None at ep=1."""

    host_group: dist.ProcessGroup
    """All ranks once more for host values (CPU tensors), apart from the training's collectives."""

    host_ep_group: dist.ProcessGroup | None
    """The ep group once more for host values; None at ep=1."""

    data: DeviceMesh | None = None
    """`(dp, cp)`: which ranks have sequences of their own, and which have slices of the same; None at cp=1."""

    host_cp_group: dist.ProcessGroup | None = None
    """The cp group once more for host values; None at cp=1."""

    @property
    def cp_mesh(self) -> DeviceMesh:
        if self.data is None:
            raise RuntimeError("there is no cp mesh at cp=1")
        return self.data["cp"]

    @property
    def cp_rank(self) -> int:
        """Which slice of its sequences this rank has, in `[0, cp)`."""
        return 0 if self.data is None else self.data.get_local_rank("cp")

    @property
    def ep_mesh(self) -> DeviceMesh:
        if self.expert is None:
            raise RuntimeError("there is no ep mesh at ep=1")
        return self.expert["ep"]

    @property
    def efsdp_mesh(self) -> DeviceMesh:
        """What FSDP2 shards the experts over: `(efsdp,)`, or `(replicate, efsdp)` when there are replicas."""
        if self.expert is None:
            raise RuntimeError("there is no efsdp mesh at ep=1: FSDP2 uses the dense mesh")
        return self.expert["replicate", "efsdp"] if self.layout.replicate > 1 else self.expert["efsdp"]

    @property
    def all_groups(self) -> list[dist.ProcessGroup]:
        """What this rank communicates over, the world's default group and the host's among it."""
        host_groups = (self.host_group, self.host_ep_group, self.host_cp_group)
        host = [group for group in host_groups if group is not None]
        world = [] if dist.group.WORLD is None else [dist.group.WORLD]
        return [*world, *host, *(group for _, group in self.groups())]

    def groups(self) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """Every process group of this rank with the name of its mesh dimension."""
        for mesh in (self.dense, self.expert, self.data):
            if mesh is not None:
                for name in mesh.mesh_dim_names or ():
                    yield name, mesh.get_group(name)


_BUILT: dict[tuple[Layout, str, timedelta | None, dist.ProcessGroup | None], Meshes] = {}


def build_meshes(layout: Layout, device_type: str, *, timeout: timedelta | None = None) -> Meshes:
    """Build the meshes of `layout` for the initialised process group; the same layout again gives the same meshes.

    Args:
        layout: its sizes.
        device_type: where the training's tensors are.
        timeout: how long a collective over one of the groups may take; None: torch's default.

    Raises:
        RuntimeError: no process group, or a collective over one of the groups failed (the message names the group).
        ValueError: the process group's size is not `layout.world`.
    """
    if not dist.is_initialized():
        raise RuntimeError("build_meshes needs an initialised process group; call torch.distributed.init_process_group")
    if dist.get_world_size() != layout.world:
        raise ValueError(f"the layout {layout} is for {layout.world} ranks, but the world has {dist.get_world_size()}")
    key = (layout, device_type, timeout, dist.group.WORLD)
    if key not in _BUILT:
        for stale in [other for other in _BUILT if other[-1] is not dist.group.WORLD]:
            del _BUILT[stale]
        _BUILT[key] = _build(layout, device_type, timeout)
    return _BUILT[key]


def _build(layout: Layout, device_type: str, timeout: timedelta | None) -> Meshes:
    replicas = (("replicate", layout.replicate),) if layout.replicate > 1 else ()

    def mesh_of(*dims: tuple[str, int]) -> DeviceMesh:
        names, sizes = zip(*(*replicas, *dims), strict=True)
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)

    dense = mesh_of(("fsdp", layout.fsdp))
    expert, host_ep_group, data, host_cp_group = None, None, None, None
    if layout.ep > 1:
        expert = mesh_of(("efsdp", layout.efsdp), ("ep", layout.ep))
        host_ep_group = _host_group(layout.world, layout.ep)
    if layout.cp > 1:
        data = init_device_mesh(device_type, (layout.data_parallel, layout.cp), mesh_dim_names=("dp", "cp"))
        host_cp_group = _host_group(layout.world, layout.cp)
    host_group = _host_group(layout.world, layout.world)
    meshes = Meshes(
        layout=layout,
        dense=dense,
        expert=expert,
        host_group=host_group,
        host_ep_group=host_ep_group,
        data=data,
        host_cp_group=host_cp_group,
    )
    groups = [(name, group, device_type) for name, group in meshes.groups()]
    groups.append(("world (host)", host_group, "cpu"))
    for name, host in (("ep (host)", host_ep_group), ("cp (host)", host_cp_group)):
        if host is not None:
            groups.append((name, host, "cpu"))
    for name, group, device in groups:
        # A group does not take over the timeout of the world's.
        if timeout is not None and dist.get_backend(group) != "fake":
            _set_pg_timeout(timeout, group)
        warm_up(name, group, device)
    return meshes


def _host_group(world: int, size: int) -> dist.ProcessGroup:
    """This rank's group out of the `world / size` groups of consecutive ranks."""
    # NCCL cannot carry CPU tensors; the other backends are used as they are.
    backend = "gloo" if "nccl" in dist.get_backend() else None
    groups = [  # every rank makes every group, in the same order
        dist.new_group(list(range(start, start + size)), backend=backend) for start in range(0, world, size)
    ]
    return groups[dist.get_rank() // size]


def warm_up(name: str, group: dist.ProcessGroup, device_type: str) -> None:
    """Run one small all-reduce over `group` and check its result.

    Raises:
        RuntimeError: the collective failed or gave a wrong sum; names the group and its ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    one = torch.ones((), dtype=torch.int64, device=device_type)
    try:
        dist.all_reduce(one, group=group)
        total = int(one.item())
    except RuntimeError as error:
        raise RuntimeError(
            f"the first collective over the {name!r} group of ranks {ranks} failed on rank {dist.get_rank()}; check"
            f" the network between these ranks ({error})"
        ) from error
    if total != len(ranks) and dist.get_backend(group) != "fake":
        raise RuntimeError(
            f"the first collective over the {name!r} group of ranks {ranks} gave {total} instead of {len(ranks)} on"
            f" rank {dist.get_rank()}; check the network between these ranks"
        )


def default_store() -> dist.Store:
    """What ranks can tell each other through without a collective."""
    return _get_default_store()


def let_gloo_finish_at_exit() -> None:
    """Before the interpreter ends: gloo's threads free the tensors of the last collectives, and need it for that.

    A thread that comes too late aborts the process (torch 2.13: "terminate called without an active exception").
    """
    atexit.register(time.sleep, 0.2)


_FORGOTTEN: list[Any] = []
"""Groups and stores that must never be destroyed here: that would wait for threads that only the parent has."""


def forget_groups() -> None:
    """In a process that was just forked: know of no process group.

    Those of the parent have their threads there, and their connections in common with it: here they can be neither
    used nor closed.
    """
    _FORGOTTEN.extend((dict(_world.pg_map), dict(_BUILT)))
    gc.freeze()  # nor collected, with all that the parent has let go of in circles
    _update_default_pg(None)
    for table in (
        _world.pg_map,
        _world.pg_names,
        _world.pg_group_ranks,
        _world.pg_backend_config,
        _world.pg_to_tag,
        _world.tags_to_pg,
        _world.pg_coalesce_state,
    ):
        table.clear()
    _world.group_count = 0
    _unregister_all_process_groups()
    # DTensor takes a mesh for another of equal shape, and would go on with the parent's groups.
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
