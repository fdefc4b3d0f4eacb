"""Saves and loads that cannot be: no space, no shared disk, missing files; every rank says so, and nothing is lost."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_moe_ep.checkpoint import durable, saving
from tests.checkpoint.runs import EP2, FORMS, SINGLE, Module, Run, make_trainer, messages, on
from tests.forks import start
from tests.pool import RankPool

forms = pytest.mark.parametrize("form", FORMS)
Usage = namedtuple("Usage", "total used free")


def _save(path: str, form: str, free: int | None, strategy: dict[str, Any], **options: Any) -> tuple[str, list[str]]:
    """On a rank: what a save tells while a training runs, with so many bytes free; and what is in the folder then."""

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(path)

    original = saving.shutil.disk_usage
    told_free = [Usage(free, 0, free)] if free is not None else []  # once, before the save
    saving.shutil.disk_usage = lambda path: told_free.pop() if told_free and dist.get_rank() == 0 else original(path)
    try:
        with messages():
            fitted = make_trainer(Run(EP2, form, max_steps=1, options=options, strategy=strategy))
            fitted.callbacks.append(Save())
            fitted.fit(Module())
        told = "no error"
    except (OSError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    finally:
        saving.shutil.disk_usage = original
    folder = Path(path).parent
    return told, sorted(p.name for p in folder.iterdir()) if folder.exists() else []


@forms
def test_no_space_for_it(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "c.ckpt")
    on(ranks, Run(EP2, form, max_steps=2, save=path))
    size = sum(file.stat().st_size for file in Path(path).rglob("*")) if FORMS[form] else os.path.getsize(path)
    for told, there in ranks.run(_save, path, form, size // 8, {}, world=2):
        assert (
            told.startswith(f"OSError: the checkpoint {path} takes ")
            and f" MiB, but only {size / 2**23:.1f} MiB are free" in told
        )
        assert there == ["c.ckpt"]
    # As much as it really takes, and some more, is enough.
    for told, _ in ranks.run(_save, path, form, size + 2**19, {}, world=2):
        assert told == "no error"
    on(ranks, Run(EP2, form, max_steps=3, resume=path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    ("form", "strategy"),
    [("folder", {}), ("folder", {"async_save": True}), ("file", {})],
    ids=["folder", "async", "file"],
)
def test_the_disk_is_full_nevertheless(ranks: RankPool, small_disk: Path, form: str, strategy: dict[str, Any]) -> None:
    path = small_disk / "c.ckpt"
    on(ranks, Run(EP2, form, max_steps=2, save=str(path)))
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**18))
    for told, there in ranks.run(_save, str(path), form, 2**40, strategy, world=2):
        assert re.match(rf"RuntimeError: the checkpoint {path} was not saved \(0\.\d MiB were free there\): ", told)
        assert there == ["c.ckpt", "filler"]
    (small_disk / "filler").unlink()
    assert on(ranks, Run(EP2, form, max_steps=3, resume=str(path)))[0].global_step == 3


def _apart(rank: int, store: str, folder: Path) -> tuple[str, list[str]]:
    """A rank with a disk of its own at `folder`."""
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14  # CLONE_NEWNS; MS_PRIVATE, MS_REC
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_mounts) or libc.mount(None, b"/", None, private | recursive, None):
        return "cannot", []
    if rank == 1 and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None):
        return "cannot", []
    saving.PATIENCE = 0.5
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    return _save(str(folder / "c.ckpt"), "folder", None, {})


def test_nodes_without_a_shared_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ranks = [start(_apart, rank, str(tmp_path / "store"), folder) for rank in range(2)]
    for _, pipe in ranks:
        assert pipe.poll(60)
        ok, answer = pipe.recv()
        assert ok, answer
        if answer[0] == "cannot":
            pytest.skip("cannot mount in a namespace of its own")
        told, there = answer
        assert told.startswith(f"RuntimeError: rank(s) [1] do not see what rank 0 wrote to {folder}/.c.ckpt.saving: ")
        assert told.endswith("or save one file from rank 0: MoEEPStrategy(save_distributed_checkpoint=False)")
        assert there == []


def _how_it_ends(of: Run) -> str:
    try:
        with messages():
            make_trainer(of).fit(Module(), ckpt_path=of.resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_folder_with_a_file_missing(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    on(ranks, Run(EP2, max_steps=1, save=str(path)))
    (path / "__1_0.distcp").unlink()
    for told in ranks.run(_how_it_ends, Run(EP2, resume=str(path)), world=2):
        assert told.startswith(f"ValueError: the checkpoint {path} is incomplete: __1_0.distcp is missing. ")


@pytest.mark.parametrize("at", [EP2, SINGLE], ids=str)
@pytest.mark.parametrize("by", ["last", "path"])
def test_what_was_set_aside_is_found(ranks: RankPool, tmp_path: Path, at: Any, by: str) -> None:
    keeps = {"dirpath": str(tmp_path), "every_n_train_steps": 1, "save_last": True}
    on(ranks, Run(at, max_steps=1, callbacks=keeps))
    path = tmp_path / "last.ckpt"
    # As where a save is interrupted when it replaces it.
    path.rename(tmp_path / ".last.ckpt.old")
    shutil.copytree(tmp_path / ".last.ckpt.old", durable.saving_place(path))
    resume = "last" if by == "last" else str(path)
    outcomes = on(ranks, Run(at, max_steps=3, callbacks=keeps, resume=resume))
    straight = on(ranks, Run(at, max_steps=3))
    assert [outcome.global_step for outcome in outcomes] == [3] * at.world
    for name, right in straight[0].weights.items():
        torch.testing.assert_close(outcomes[0].weights[name], right)


def _goes_on_by_itself(folder: str) -> int:
    """On a rank: a fit that is not told of the checkpoint that an exception left; where it begins."""

    class First(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            steps.append(trainer.global_step)

    steps: list[int] = []
    with messages():
        callbacks = [First(), OnExceptionCheckpoint(folder)]
        make_trainer(Run(EP2, max_steps=3, options={"callbacks": callbacks, "enable_checkpointing": True})).fit(
            Module()
        )
    return steps[0]


def test_what_an_exception_left_is_found(ranks: RankPool, tmp_path: Path) -> None:
    on(ranks, Run(EP2, max_steps=2, save=str(tmp_path / ".on_exception.ckpt.old")))
    assert ranks.run(_goes_on_by_itself, str(tmp_path), world=2) == [2, 2]


@forms
def test_what_saving_refuses(ranks: RankPool, form: str) -> None:
    for told, _ in ranks.run(_refuses_a_place, form, world=2):
        assert told == "a checkpoint cannot be saved to s3://bucket/c.ckpt: only to paths that the file system has"
    for told in ranks.run(_refuses_a_plugin, form, world=2):
        assert told.startswith("ValueError: MoEEPStrategy writes and reads checkpoints itself, not through AsyncCheck")


def _refuses_a_place(form: str) -> tuple[str, str]:
    with messages():
        fitted = make_trainer(Run(EP2, form, max_steps=1))
        fitted.fit(Module())
        with pytest.raises(ValueError) as place:
            fitted.save_checkpoint("s3://bucket/c.ckpt")
        with pytest.raises(TypeError, match="storage_options") as options:
            fitted.save_checkpoint("c.ckpt", storage_options={})
    return str(place.value), str(options.value)


def _refuses_a_plugin(form: str) -> str:
    return _how_it_ends(Run(EP2, form, options={"plugins": [AsyncCheckpointIO()]}))
