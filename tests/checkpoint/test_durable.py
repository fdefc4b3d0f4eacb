"""A process that dies between any two steps of a save, a removal or a link leaves the old or the new one, whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load

from lightning_moe_ep.checkpoint import Saver, durable
from lightning_moe_ep.checkpoint.saving import META
from tests.checkpoint.crashes import at_each_step, in_child
from tests.forks import forked

NAME = "last.ckpt"
OLD, NEW = 1.0, 2.0


def save(path: Path, form: str, value: float) -> None:
    """By a world of one rank."""
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        saver = Saver(folders=form == "folder", meanwhile=False, timeout=timedelta(seconds=30))
        checkpoint = {"state_dict": {"w": torch.tensor(value)}, "optimizer_states": [], "value": value}
        assert dist.group.WORLD is not None
        saver.save(path, checkpoint, dist.group.WORLD)
        dist.destroy_process_group()


def value_of(path: Path) -> float:
    """Of a checkpoint of either form, which must be whole."""
    if path.is_file():
        checkpoint = torch.load(path)
        assert float(checkpoint["state_dict"]["w"]) == checkpoint["value"]
        return checkpoint["value"]
    durable.check_complete(path)
    assert (path / durable.MARKER).exists()
    state = {"state_dict": {"w": torch.tensor(0.0)}}
    load(state, checkpoint_id=path, no_dist=True)
    assert float(state["state_dict"]["w"]) == torch.load(path / META)["value"]
    return float(state["state_dict"]["w"])


def arrange(folder: Path, before: str) -> None:
    """What is there before the save: nothing, a folder, a file, a link to a folder, a link to nowhere."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / NAME
    if before in ("folder", "file"):
        assert in_child(lambda: save(path, before, OLD)) == 0
    elif before == "link":
        assert in_child(lambda: save(folder / "step=1.ckpt", "folder", OLD)) == 0
        durable.link(folder / "step=1.ckpt", path)
    elif before == "broken link":
        path.symlink_to(folder / "deleted.ckpt")


def killed_saves(folder: Path, before: str, form: str, exchanges: bool) -> tuple[int, set[float]]:
    """In a process without threads: how many died, and which values were found."""
    if not exchanges:
        durable._exchange = lambda one, other: False
    path = folder / NAME
    found: set[float] = set()

    def check(number: int) -> None:
        visible = {p.name for p in folder.iterdir() if p.name.startswith("last") and p.suffix == ".ckpt"}
        assert visible <= {NAME}
        durable.recover_all(folder)  # what the Trainer's start does for ckpt_path="last"
        if path.exists():
            found.add(value_of(path))
        else:
            assert before in ("nothing", "broken link"), f"killed before change {number}: nothing is there"
        if before == "link":
            assert value_of(folder / "step=1.ckpt") == OLD
        assert in_child(lambda: save(path, form, NEW)) == 0
        assert value_of(path) == NEW and path.is_dir() == (form == "folder") and not path.is_symlink()
        assert {p.name for p in folder.iterdir()} == {NAME, *({"step=1.ckpt"} if before == "link" else ())}

    died = at_each_step(folder, lambda: arrange(folder, before), lambda: save(path, form, NEW), check)
    return died, found


WAYS = [
    pytest.param("folder", "folder", True, marks=pytest.mark.more),
    ("folder", "folder", False),
    ("file", "file", False),
    ("link", "folder", False),
    *(
        pytest.param(before, form, exchanges, marks=pytest.mark.more)
        for before, form, exchanges in [
            ("file", "file", True),
            ("folder", "file", True),
            ("folder", "file", False),
            ("link", "folder", True),
            ("link", "file", True),
            ("link", "file", False),
            ("file", "folder", True),
            ("file", "folder", False),
            ("nothing", "folder", True),
            ("nothing", "file", True),
            ("broken link", "folder", True),
            ("broken link", "folder", False),
        ]
    ),
]


@pytest.mark.parametrize(("before", "form", "exchanges"), WAYS)
def test_a_save_that_is_killed_at_any_step(tmp_path: Path, before: str, form: str, exchanges: bool) -> None:
    died, found = forked(killed_saves, tmp_path / "checkpoints", before, form, exchanges)
    assert died >= (6 if form == "folder" else 2)
    assert found == ({OLD, NEW} if before in ("folder", "file", "link") else found & {NEW})


def killed_removals(folder: Path) -> tuple[int, set[bool]]:
    path = folder / NAME
    found = set()

    def check(number: int) -> None:
        found.add(path.exists())
        if path.exists():
            assert value_of(path) == OLD
        assert in_child(lambda: save(folder / "other.ckpt", "folder", NEW)) == 0
        assert not list(folder.glob(".*"))

    return at_each_step(folder, lambda: arrange(folder, "folder"), lambda: durable.discard(path), check), found


def test_a_removal_that_is_killed_at_any_step(tmp_path: Path) -> None:
    died, found = forked(killed_removals, tmp_path / "checkpoints")
    assert died >= 4 and found == {True, False}


def killed_links(folder: Path, before: str, exchanges: bool) -> tuple[int, set[float]]:
    if not exchanges:
        durable._exchange = lambda one, other: False
    path, target = folder / NAME, folder / "step=2.ckpt"
    found = set()

    def prepare() -> None:
        arrange(folder, before)
        assert in_child(lambda: save(target, "folder", NEW)) == 0

    def check(number: int) -> None:
        durable.recover_all(folder)
        found.add(value_of(path))

    return at_each_step(folder, prepare, lambda: durable.link(target, path), check), found


@pytest.mark.parametrize("before", ["link", "folder"])
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_link_that_is_killed_at_any_step(tmp_path: Path, before: str, exchanges: bool) -> None:
    died, found = forked(killed_links, tmp_path / "checkpoints", before, exchanges)
    # Where one link replaces another in one step, there is no step after it.
    assert died >= 2 and found in ({OLD, NEW}, {OLD})
    assert found == {OLD, NEW} or (before == "link" and not exchanges)


def test_exchanging_names_works_here(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.write_text("a file")
    if not durable._exchange(one, other):
        pytest.skip("this file system cannot exchange names")
    assert one.is_file() and other.is_dir()
    assert not durable._exchange(one, tmp_path / "missing")


def test_discarding_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    durable.link(tmp_path / "target", tmp_path / NAME)
    assert os.readlink(tmp_path / NAME) == "target"
    durable.discard(tmp_path / NAME)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def sealed(folder: Path) -> Path:
    folder.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", META):
        (folder / name).write_bytes(b"12345678")
    durable.seal(folder)
    return folder


def test_the_marker_lists_all_other_files(tmp_path: Path) -> None:
    folder = sealed(tmp_path / NAME)
    record = json.loads((folder / "complete.json").read_text())
    assert record["format"] == 1
    assert record["files"] == {"__0_0.distcp": 8, "__1_0.distcp": 8, "meta.pt": 8}
    assert record["ends"].keys() == record["files"].keys()
    durable.check_complete(folder)
    (folder / "complete.json").unlink()
    durable.check_complete(folder)  # as stock Lightning leaves it


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "__1_0.distcp").unlink(), "is incomplete: __1_0.distcp is missing. Copy it again"),
        (lambda folder: (folder / META).write_bytes(b"1"), "is incomplete: meta.pt has 1 bytes instead of 8. Copy"),
        (lambda folder: (folder / "__1_0.distcp").write_bytes(b"another!"), "__1_0.distcp is not the file that was sa"),
        (lambda folder: (folder / durable.MARKER).write_text("{"), "complete.json, which lists the files of the c"),
        (lambda folder: (folder / durable.MARKER).write_text("{}"), "is broken: KeyError('format')"),
        (
            lambda folder: (folder / durable.MARKER).write_text('{"format": 2, "files": {}}'),
            "complete.json has the format 2; this version of lightning_moe_ep reads 1",
        ),
    ],
)
def test_an_incomplete_folder(tmp_path: Path, damage: Any, words: str) -> None:
    folder = sealed(tmp_path / NAME)
    damage(folder)
    with pytest.raises(ValueError) as error:
        durable.check_complete(folder)
    assert words in str(error.value)
