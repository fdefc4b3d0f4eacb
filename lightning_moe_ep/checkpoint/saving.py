"""Saving a Trainer's checkpoints: a folder that all ranks write, or a file that rank 0 writes; at once or meanwhile.

Either is written beside its place and takes its name when it is complete and on the disk (`durable`). All ranks end a
save in the same way: it has its name, or they raise, and what was there before is whole.
"""

from __future__ import annotations

import io
import math
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from lightning_moe_ep.checkpoint import durable
from lightning_moe_ep.checkpoint.agreement import on_every_rank, on_rank_0
from lightning_moe_ep.checkpoint.stored import CURRENT, META
from lightning_moe_ep.trees import tensors_of

TOKEN = "token"
"""A file by which the ranks see that they look at one folder."""

PATIENCE = 30.0
"""Seconds until a rank must see what rank 0 wrote: network file systems keep what they know of a folder for a while."""

OVERHEAD = 4096
"""Bytes beside its own that a tensor takes at most in a file."""


class FolderSave:
    """A save in the folder form: made where training waits, written there or in another thread."""

    def __init__(self, path: Path, checkpoint: dict[str, Any], group: dist.ProcessGroup) -> None:
        """Make the folder in which the checkpoint is written; every rank calls this.

        Args:
            path: where it is to be; what is there is replaced when it is complete.
            checkpoint: Lightning's, with sharded weights and `optimizer_states`, which are taken out.
            group: all ranks, for CPU tensors.

        Raises:
            OSError: there is not enough space, or the folder cannot be made; on every rank.
            RuntimeError: the ranks do not see one file system; on every rank.
        """
        self.path = path
        self.state: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
        if CURRENT in checkpoint:
            self.state[CURRENT] = checkpoint.pop(CURRENT)
        for number, state in enumerate(checkpoint.pop("optimizer_states", [])):
            self.state[f"optimizer_{number}"] = state
        self._meta = io.BytesIO()
        on_rank_0(lambda: torch.save(checkpoint, self._meta), group=group)  # now, as training goes on changing it
        size = sum(on_every_rank(lambda: _share_of(self.state), group=group)) + len(self._meta.getbuffer())
        saving = durable.saving_place(path)
        token = on_rank_0(lambda: _make_folder(path, size), group=group)
        seen = on_every_rank(lambda: _sees(saving / TOKEN, token), group=group)
        if not all(seen):
            _clear(path, group)
            blind = [rank for rank, sees in enumerate(seen) if not sees]
            raise RuntimeError(
                f"rank(s) {blind} do not see what rank 0 wrote to {saving}: a checkpoint in the folder form needs a"
                " file system that all nodes share. Let the path (ModelCheckpoint's dirpath, or default_root_dir) lead"
                " to one, or save one file from rank 0: MoEEPStrategy(save_distributed_checkpoint=False)"
            )

    def write(self, group: dist.ProcessGroup) -> None:
        """Write it and give it its name; every rank calls this.

        Args:
            group: all ranks, for CPU tensors; of this thread alone.

        Raises:
            RuntimeError: that failed on some rank; on every rank, with what was there before as it was.
        """
        saving = durable.saving_place(self.path)
        # It syncs the files that it writes. What it writes is on the CPU already: nothing is to be copied ahead.
        writer = FileSystemWriter(saving, per_thread_copy_ahead=0)
        try:
            save(self.state, storage_writer=writer, process_group=group)
            on_rank_0(self._finish, group=group)
        except (Exception, CheckpointException) as error:
            raise _failed(self.path, error, group) from error

    def _finish(self) -> None:
        saving = durable.saving_place(self.path)
        (saving / TOKEN).unlink()
        _write(saving / META, self._meta.getbuffer())
        durable.seal(saving)
        durable.put_in_place(saving, self.path)


def save_file(path: Path, checkpoint: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint as one file; every rank calls this.

    Args:
        path: the file; what is there is replaced when it is complete.
        checkpoint: Lightning's, whole on rank 0.
        group: all ranks, for CPU tensors; None: there is one process.

    Raises:
        OSError: there is not enough space; on every rank.
        RuntimeError: writing it failed; on every rank, with what was there before as it was.
    """

    def write() -> None:
        saving = durable.saving_place(path)
        with saving.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        durable.put_in_place(saving, path)

    tensors = tensors_of([checkpoint.get(key) for key in ("state_dict", CURRENT, "optimizer_states")])
    on_rank_0(lambda: _make_room(path, sum(tensor.nbytes + OVERHEAD for tensor in tensors)), group=group)
    try:
        on_rank_0(write, group=group)
    except Exception as error:
        raise _failed(path, error, group) from error


def _make_folder(path: Path, size: int) -> str:
    """The folder to write in, with a token in it; returns that."""
    _make_room(path, size)
    saving = durable.saving_place(path)
    saving.mkdir()
    token = secrets.token_hex(16)
    (saving / TOKEN).write_text(token)
    return token


def _make_room(path: Path, size: int) -> None:
    """See that there are `size` bytes for a new checkpoint beside `path`."""
    durable.make_folder(path.parent)
    durable.clean(path)
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise OSError(
            f"the checkpoint {path} takes {size / 2**20:,.1f} MiB, but only {free / 2**20:,.1f} MiB are free there (the"
            " one that it replaces is removed when it is complete). Remove what is not needed, keep fewer"
            " (ModelCheckpoint's save_top_k), or save elsewhere"
        )


def _share_of(state: Mapping[str, Any]) -> int:
    """How many bytes this rank writes, at most; a tensor that several ranks hold counts once over all of them."""
    size = 0.0
    for tensor in tensors_of(state):
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            copies = [mesh.size(dim) for dim, place in enumerate(tensor.placements) if place.is_replicate()]
            size += tensor._local_tensor.nbytes / math.prod(copies) + OVERHEAD
        elif dist.get_rank() == 0:
            size += tensor.nbytes + OVERHEAD
    return int(size)


def _sees(file: Path, token: str) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if file.read_text() == token:
                return True
        except OSError:
            pass
        time.sleep(0.05)
    return False


def _write(file: Path, content: memoryview) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _clear(path: Path, group: dist.ProcessGroup | None) -> str:
    """After a failure, before any rank goes on: leave nothing of the save, if that can be; tells what space there was.

    torch.save may call a full disk an "unexpected pos".
    """

    def clear() -> str:
        free = shutil.disk_usage(path.parent).free
        durable.delete(durable.saving_place(path))
        return f" ({free / 2**20:,.1f} MiB were free there)"

    try:
        return on_rank_0(clear, group=group)
    except (OSError, RuntimeError):  # there may be ranks that are gone; the next save clears it
        return ""


def _failed(path: Path, error: BaseException, group: dist.ProcessGroup | None) -> RuntimeError:
    if isinstance(error, CheckpointException):
        failures = sorted(error.failures.items())
        reason = "; ".join(f"{type(e).__name__} on rank {rank}: {e}" for rank, (e, _) in failures)
    else:
        reason = f"{type(error).__name__}: {error}"
    return RuntimeError(f"the checkpoint {path} was not saved{_clear(path, group)}: {reason}")
