"""A folder becomes the file that the strategy would have written, and back, and both resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_moe_ep import convert_to_file, convert_to_folder
from lightning_moe_ep.checkpoint.stored import Stored, open_checkpoint
from lightning_moe_ep.trees import map_leaves
from tests.checkpoint.exported import train_family
from tests.checkpoint.runs import EP2, MIXED, N, Run, on, run
from tests.matrix import mostly_more
from tests.parity import worst
from tests.pool import RankPool

MODELS = mostly_more(["even", "6 experts of odd width", "a list of experts"], "a list of experts")


def check_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Bit for bit; keys in any order."""
    assert type(ours) is type(theirs), f"{path}: {type(ours)} instead of {type(theirs)}"
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key in theirs:
            check_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), path
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        for number, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
            check_same(mine, right, f"{path}[{number}]")
    else:
        assert ours == theirs, path


def content(path: Path) -> Any:
    """All of a checkpoint."""
    opened = open_checkpoint(path)
    read = lambda leaf: leaf.whole() if isinstance(leaf, Stored) else leaf  # noqa: E731
    return map_leaves(read, [opened.weights, opened.optimizers, opened.rest])


@pytest.mark.parametrize("model", MODELS)
def test_a_folder_becomes_the_file_and_the_file_the_folder(ranks: RankPool, tmp_path: Path, model: str) -> None:
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    on(ranks, Run(MIXED, "folder", model, save=str(folder)))
    on(ranks, Run(MIXED, "file", model, save=str(file)))
    made, back = tmp_path / "made.ckpt", tmp_path / "back.ckpt"
    convert_to_file(folder, made, max_memory="5kB")
    convert_to_folder(made, back, max_memory="5kB")
    check_same(torch.load(made, weights_only=True), torch.load(file, weights_only=True))
    check_same(content(back), content(folder))
    convert_to_folder(file, tmp_path / "other.ckpt")
    check_same(content(tmp_path / "other.ckpt"), content(folder))
    names = {path.name for path in back.iterdir()}
    assert names == {"__0_0.distcp", ".metadata", "meta.pt", "complete.json"}
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{n}.ckpt" for n in ("folder", "file", "made", "back", "other")
    }

    straight = run(Run(model=model, max_steps=2 * N)).weights
    for to in (
        Run(None, model=model, resume=str(made), max_steps=2 * N),  # plain Lightning
        Run(EP2, "folder", model, resume=str(back), max_steps=2 * N),
    ):
        for outcome in on(ranks, to):
            assert outcome.global_step == 2 * N
            error, name = worst(outcome.weights, straight)
            assert error < 1e-5, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("optimizer", ["sgd"])
def test_an_optimizer_without_state(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    folder, file = tmp_path / "folder.ckpt", tmp_path / "file.ckpt"
    of = Run(EP2, "folder", "a list of experts", optimizer, max_steps=1, save=str(folder))
    on(ranks, of)
    on(ranks, replace(of, form="file", save=str(file)))
    convert_to_file(folder, tmp_path / "made.ckpt")
    check_same(torch.load(tmp_path / "made.ckpt", weights_only=True), torch.load(file, weights_only=True))
    convert_to_folder(tmp_path / "made.ckpt", tmp_path / "back.ckpt")
    check_same(content(tmp_path / "back.ckpt"), content(folder))


def test_weights_only_and_frozen_experts(ranks: RankPool, tmp_path: Path) -> None:
    frozen = {"frozen": r"experts\.w1"}
    for name, more in {"frozen": {"hparams": frozen}, "weights": {"weights_only": True}}.items():
        folder, file = tmp_path / f"{name}.folder", tmp_path / f"{name}.file"
        of = Run(EP2, "folder", "a list of experts", max_steps=1, save=str(folder), **more)
        on(ranks, of)
        on(ranks, replace(of, form="file", save=str(file)))
        convert_to_file(folder, tmp_path / "made.ckpt")
        made, right = torch.load(tmp_path / "made.ckpt", weights_only=True), torch.load(file, weights_only=True)
        check_same(made, right)
        (tmp_path / "made.ckpt").unlink()
        convert_to_folder(file, tmp_path / f"{name}.back")
        check_same(content(tmp_path / f"{name}.back"), content(folder))


def test_a_family_that_has_other_tensors_in_memory(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train_family, "longcat_flash", str(tmp_path), {}, world=2)
    folder, file = tmp_path / "longcat_flash.folder", tmp_path / "longcat_flash.file"
    convert_to_file(folder, tmp_path / "made.ckpt", max_memory="5kB")
    check_same(torch.load(tmp_path / "made.ckpt", weights_only=True), torch.load(file, weights_only=True))
    convert_to_folder(file, tmp_path / "back.ckpt", max_memory="5kB")
    # The rows for zero experts never have a gradient; beside those of the others the file has zeros for them.
    check_same(content(tmp_path / "back.ckpt"), content(folder))


def test_an_adapter_moves_more_than_rows(ranks: RankPool, tmp_path: Path) -> None:
    lora = {"r": 4, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    on(ranks, Run(EP2, "folder", max_steps=1, save=str(tmp_path / "c.ckpt"), hparams={"lora": lora}))
    with pytest.raises(NotImplementedError, match=r"cannot be taken to the plain model's form.*save_distributed_check"):
        convert_to_file(tmp_path / "c.ckpt", tmp_path / "made.ckpt")


def test_what_is_refused(tmp_path: Path) -> None:
    run(Run(max_steps=1, save=str(tmp_path / "c.ckpt")))
    with pytest.raises(ValueError, match="is one file already"):
        convert_to_file(tmp_path / "c.ckpt", tmp_path / "out")
    with pytest.raises(ValueError, match="does not say which parameters its optimizers have"):
        convert_to_folder(tmp_path / "c.ckpt", tmp_path / "out")
    run(Run(max_steps=1, save=str(tmp_path / "w.ckpt"), weights_only=True))
    convert_to_folder(tmp_path / "w.ckpt", tmp_path / "out")
    with pytest.raises(ValueError, match="is a folder already"):
        convert_to_folder(tmp_path / "out", tmp_path / "again")
    with pytest.raises(FileExistsError, match=r"w\.ckpt is there already"):
        convert_to_file(tmp_path / "out", tmp_path / "w.ckpt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileExistsError, match="is a folder; give the name of a file"):
        convert_to_file(tmp_path / "out", tmp_path / "empty")
    assert {path.name for path in tmp_path.iterdir()} == {"c.ckpt", "w.ckpt", "out", "empty"}


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Run(max_steps=1, save=str(tmp_path / "w.ckpt"), weights_only=True))
    convert_to_folder(tmp_path / "w.ckpt", tmp_path / "folder")

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("lightning_moe_ep.checkpoint.convert.write_at", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        convert_to_file(tmp_path / "folder", tmp_path / "made.ckpt")
    monkeypatch.setattr(Stored, "spans", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        convert_to_folder(tmp_path / "w.ckpt", tmp_path / "made")
    assert {path.name for path in tmp_path.iterdir()} == {"w.ckpt", "folder"}
