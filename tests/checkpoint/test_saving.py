"""What ModelCheckpoint and the Trainer write and read through the strategy, in both forms, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import _redistribute

from tests.checkpoint.runs import EP2, EP4, FORMS, MIXED, Module, Run, make_trainer, messages, on
from tests.matrix import mostly_more
from tests.parity import worst
from tests.pool import RankPool

forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize(
    ("form", "meanwhile", "save_last"),
    mostly_more(
        [(*way, last) for way in (("folder", False), ("folder", True), ("file", False)) for last in (True, "link")],
        ("folder", False, True),
        ("folder", True, "link"),
        ("file", False, "link"),
    ),
)
def test_model_checkpoint(ranks: RankPool, tmp_path: Path, form: str, meanwhile: bool, save_last: Any) -> None:
    keeps = {
        "dirpath": str(tmp_path),
        "filename": "{step}",
        "monitor": "step",
        "mode": "max",
        "every_n_train_steps": 2,
        "save_top_k": 2,
        "save_last": save_last,
    }
    strategy = {"async_save": meanwhile}
    on(ranks, Run(MIXED, form, max_steps=6, callbacks=keeps, strategy=strategy))
    names = {"step=4.ckpt", "step=6.ckpt", "last.ckpt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    for name in names:
        assert (tmp_path / name).is_dir() == FORMS[form]

    outcomes = on(ranks, Run(EP2, form, max_steps=10, callbacks=keeps, resume="last", strategy=strategy))
    assert [outcome.global_step for outcome in outcomes] == [10, 10]
    # It goes on keeping the best two: those of before are forgotten only as newer ones come.
    assert {path.name for path in tmp_path.iterdir()} == {"step=8.ckpt", "step=10.ckpt", "last.ckpt"}
    (straight,) = on(ranks, Run(max_steps=10))
    error, name = worst(outcomes[0].weights, straight.weights)
    assert error < 1e-5, f"{name} is off by {error:.1e}"


@forms
def test_a_save_replaces_what_was_there(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = tmp_path / "again.ckpt"
    on(ranks, Run(EP4, "folder", max_steps=1, save=str(path)))
    assert len(list(path.glob("*.distcp"))) == 4
    listed = json.loads((path / "complete.json").read_text())["files"]
    assert listed == {file.name: file.stat().st_size for file in path.iterdir() if file.name != "complete.json"}
    assert {".metadata", "meta.pt", "__0_0.distcp"} < set(listed)
    on(ranks, Run(EP2, form, max_steps=2, save=str(path)))
    assert path.is_dir() == FORMS[form]
    if path.is_dir():
        assert len(list(path.glob("*.distcp"))) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["again.ckpt"]
    assert on(ranks, Run(EP4, form, max_steps=3, resume=str(path)))[0].global_step == 3
    on(ranks, Run(EP4, "folder", max_steps=1, save=str(path)))
    assert len(list(path.glob("*.distcp"))) == 4


def test_a_save_replaces_a_link_to_nowhere(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.symlink_to(tmp_path / "deleted.ckpt")
    on(ranks, Run(EP2, max_steps=1, save=str(path)))
    assert path.is_dir() and not path.is_symlink()


def _refused(of: Run) -> str:
    """On a rank: how the fit ends."""
    try:
        with messages():
            make_trainer(of).fit(Module(), ckpt_path=of.resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _validated(of: Run) -> float:
    return make_trainer(of).validate(Module(), ckpt_path=of.resume, verbose=False)[0]["val_loss"]


@forms
def test_a_checkpoint_of_weights_only(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = str(tmp_path / "weights.ckpt")
    on(ranks, Run(MIXED, form, save=path, weights_only=True))
    of = Run(EP2, form, resume=path, options={"limit_val_batches": 1})
    losses = ranks.run(_validated, of, world=2)
    assert losses[0] == losses[1] == pytest.approx(_validated(Run(resume=_whole(ranks, tmp_path), options=of.options)))
    for told in ranks.run(_refused, of, world=2):
        assert told.startswith("KeyError: ")
        assert "was saved with save_weights_only=True. Train on from its weights by loading them into the mod" in told


def _whole(ranks: RankPool, folder: Path) -> str:
    """The same weights in a form that plain Lightning reads."""
    path = str(folder / "whole.ckpt")
    on(ranks, Run(MIXED, "file", save=path, weights_only=True))
    return path


@forms
@pytest.mark.parametrize("kind", ["missing", "folder", "text", "weights"])
def test_what_is_no_checkpoint(ranks: RankPool, tmp_path: Path, form: str, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    if kind == "text":
        path.write_text("no checkpoint")
    if kind == "weights":
        torch.save({"weight": torch.zeros(2)}, path)
        words = f"{path} is not a Trainer's checkpoint: it has no state_dict, but ['weight']"
    elif kind == "missing":
        words = f"the checkpoint {path} does not exist, or not where this rank can see it"
    else:
        words = f"{path} is not a checkpoint: neither a folder with meta.pt and shards, nor a file that torch.save wro"
    for told in ranks.run(_refused, Run(EP2, form, resume=str(path)), world=2):
        assert words in told


def _validate_after_fit(form: str, path: str) -> tuple[float, float, float]:
    """On a rank: the validation loss at the end of a fit, without weights, and from the checkpoint again."""
    with messages():
        of = Run(MIXED, form, max_steps=2, options={"limit_val_batches": 1})
        fitted, module = make_trainer(of), Module()
        fitted.fit(module)
        fitted.save_checkpoint(path)
        first = fitted.validate(module, verbose=False)[0]["val_loss"]
        for parameter in module.parameters():
            parameter.detach().zero_()
        later = fitted.validate(module, verbose=False)[0]["val_loss"]
        again = fitted.validate(module, ckpt_path=path, verbose=False)[0]["val_loss"]
    return first, later, again


@forms
def test_validate_from_a_checkpoint_after_fit(ranks: RankPool, tmp_path: Path, form: str) -> None:
    for first, later, again in ranks.run(_validate_after_fit, form, str(tmp_path / "c.ckpt"), world=4):
        assert first == pytest.approx(again, rel=1e-6)
        assert first != pytest.approx(later, rel=1e-4)


@forms
def test_hyperparameters(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = tmp_path / "c.ckpt"
    hparams = {"a_list": [1, 2.5], "a_dict": {"text": "x", "nothing": None}, "a_path": Path("data/text")}
    on(ranks, Run(EP2, form, max_steps=1, save=str(path), hparams=hparams))
    kept = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)["hyper_parameters"]
    assert kept == {"model": "even", "optimizer": "adamw", **hparams}
    assert on(ranks, Run(EP2, form, max_steps=2, resume=str(path)))[0].global_step == 2


def _messages_of_saving(form: str, path: str) -> tuple[list[str], list[str]]:
    """On a rank: what two saves and a load tell, and what `full_tensor` of an expert weight tells."""
    of = Run(MIXED, form, max_steps=1)
    fitted, module = make_trainer(of), Module()
    fitted.fit(module)
    _redistribute._warned_flatten_issues.clear()  # torch warns once a process
    with messages() as told:
        fitted.save_checkpoint(path)
        fitted.save_checkpoint(path)
        fitted.strategy.load_checkpoint(path)
    with messages() as control:
        module.model.blocks[0].moe.experts.gate_up_proj.full_tensor()
    return told, control


@forms
def test_saving_and_loading_say_nothing(ranks: RankPool, tmp_path: Path, form: str) -> None:
    for told, control in ranks.run(_messages_of_saving, form, str(tmp_path / "c.ckpt"), world=4):
        assert told == []
        assert any("sequential all_gather" in message for message in control)
