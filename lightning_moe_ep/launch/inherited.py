"""What a forked rank has of the process that it was forked from, and has to be rid of before it does anything.

Memory is copied by a fork, threads are not. A process group of the parent (a run on one device in the same notebook
makes one) has its threads there and its connections in common with the parent: here it can be neither used nor closed.
"""

from __future__ import annotations

from typing import Any

import torch

# Private; read at torch 2.13.0. A test fails when they move.
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed.distributed_c10d import _update_default_pg, _world
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_KEPT: list[Any] = []
"""The parent's process groups and stores, so that they are never destroyed here: that would wait for their threads."""


def let_go() -> None:
    """In a process that was just forked: compute in one thread, and know of no process group."""
    # OpenMP's threads are the parent's too; with more than one, the first parallel loop waits for them forever.
    torch.set_num_threads(1)
    _KEPT.append(dict(_world.pg_map))
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
