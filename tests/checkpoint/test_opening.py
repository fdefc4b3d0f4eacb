"""`load_from_checkpoint` of either form, in one process, for a module of one's own and for ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.core import saving

from tests.checkpoint.exported import FamilyModule, train_family
from tests.checkpoint.runs import EP2, MIXED, Module, Run, on
from tests.pool import RankPool


@pytest.mark.parametrize("form", ["folder", "file"])
@pytest.mark.parametrize("model", ["even", "a list of experts"])
def test_a_module_of_ones_own(ranks: RankPool, tmp_path: Path, model: str, form: str) -> None:
    path = tmp_path / "c.ckpt"
    weights = on(ranks, Run(MIXED, form, model, max_steps=2, save=str(path), hparams={"a_list": [1]}))[0].weights
    loaded = Module.load_from_checkpoint(path)
    assert loaded.hparams == {"model": model, "optimizer": "adamw", "a_list": [1]}
    state = loaded.model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_model_of_transformers(ranks: RankPool, tmp_path: Path, form: str) -> None:
    ranks.run(train_family, "longcat_flash", str(tmp_path), {}, world=2)
    right = torch.load(tmp_path / "longcat_flash.file", weights_only=True)["state_dict"]
    state = FamilyModule.load_from_checkpoint(str(tmp_path / f"longcat_flash.{form}")).state_dict()
    assert state.keys() == right.keys()
    assert all(torch.equal(state[name], right[name]) for name in right)


class _Other(Module):
    def configure_model(self) -> None:
        super().configure_model()
        self.model.more = torch.nn.Linear(2, 2)


def test_strict_and_arguments(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    on(ranks, Run(EP2, "folder", max_steps=1, save=str(path)))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "model.more.weight"'):
        _Other.load_from_checkpoint(path)
    loaded = _Other.load_from_checkpoint(path, strict=False, optimizer="sgd", map_location="cpu")
    assert loaded.hparams.optimizer == "sgd"
    for location in (torch.device("cpu"), {"cpu": "cpu"}, lambda storage, place: storage):
        assert next(Module.load_from_checkpoint(path, map_location=location).parameters()).device.type == "cpu"


def test_other_things_go_lightnings_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that is wrapped, which is private (lightning 2.6.6), is still the one that reads."""
    for path in (tmp_path, "http://nowhere/c.ckpt"):
        with pytest.raises(Exception, match=r"Is a directory|urlopen error|nowhere"):
            Module.load_from_checkpoint(path)
    asked = []

    def load(path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        asked.append(path)
        raise KeyError

    monkeypatch.setattr(saving, "pl_load", load)
    with pytest.raises(KeyError):
        L.LightningModule.load_from_checkpoint("c.ckpt")
    assert asked == ["c.ckpt"]
