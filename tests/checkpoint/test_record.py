"""What a checkpoint says of the run that saved it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import lightning_moe_ep
from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.checkpoint import describe
from lightning_moe_ep.layout import Layout
from tests.checkpoint.runs import FORMS, MIXED, Run, on
from tests.models import build
from tests.parity import trainer
from tests.pool import RankPool


def record_of(path: Path) -> dict[str, Any]:
    """Read as plain types only."""
    return torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)["moe_ep"]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_ones_own(ranks: RankPool, tmp_path: Path, form: str) -> None:
    path = tmp_path / "c.ckpt"
    on(ranks, Run(MIXED, form, max_steps=1, save=str(path)))
    record = record_of(path)
    assert record.pop("random")
    ((matrices, vectors),) = record.pop("optimizers")
    assert record == {
        "version": lightning_moe_ep.__version__,
        "layout": {"replicate": 1, "efsdp": 2, "ep": 2, "cp": 1},
        "experts": {"model.blocks.0.moe.experts": 8, "model.blocks.1.moe.experts": 8},
        "models": {},
        "pieces": {},
        "never_stepped": {},
    }
    assert "model.blocks.0.moe.experts.down_proj" in matrices and "model.head.bias" in vectors


class Two(L.LightningModule):
    def configure_model(self) -> None:
        self.model = build("qwen3_moe", lora={"target_modules": ["q_proj"]})
        self.others = nn.ModuleDict({"teacher": build("mixtral")})

    def forward(self) -> None:
        """Only so that it can be given to `predict`."""


def _saved(path: str) -> dict[str, Any]:
    module = Two()
    fitted = trainer(MoEEPStrategy(ep=2))
    fitted.predict(module, [])
    fitted.save_checkpoint(path)
    return json.loads(module.others["teacher"].config.to_json_string(use_diff=False))


def test_models_of_transformers(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    config, _ = ranks.run(_saved, str(path), world=2)
    record = record_of(path)
    assert len(record["experts"]) == 4
    assert {name: model["class"] for name, model in record["models"].items()} == {
        "model.base_model.model": "Qwen3MoeForCausalLM",
        "others.teacher": "MixtralForCausalLM",
    }
    assert record["models"]["others.teacher"]["config"] == config
    assert config["num_local_experts"] == 8 and config["model_type"] == "mixtral"


def test_a_model_that_is_the_module_itself() -> None:
    record = describe(build("mixtral"), Layout.for_world(1, ep=1))
    assert list(record["models"]) == [""] and record["experts"] == {}
