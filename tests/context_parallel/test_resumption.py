"""A training that goes on at another cp is the one that it would have been; so is what callbacks saw of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe_ep import (
    CausalLMModule,
    ExpertBiasCallback,
    ExpertLoadMonitor,
    MoEEPStrategy,
    SentinelCallback,
    ShardedWeightAveraging,
    merged_model,
)
from tests.callbacks.test_monitor import Reports
from tests.checkpoint.test_record import record_of
from tests.checkpoint.test_resumption import SaveAt
from tests.context_parallel.parity import MODELS
from tests.contract import contract
from tests.models import ADAM_EPS
from tests.parity import plain, trainer, worst
from tests.pool import RankPool

CONFIG: dict[str, Any] = {  # of a family whose routers choose by a bias
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
    **MODELS["deepseek_v3"],
}
ROWS, STEPS, LENGTH = 8, 4, 8


@dataclass(frozen=True)
class At:
    """A run: its layout, and where it begins, or saves."""

    world: int
    cp: int
    ep: int = 1
    resume: str | None = None
    save: str | None = None


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(index))
        ids[0] = index
        return {"input_ids": ids, "labels": ids}


class Trained(CausalLMModule):
    def __init__(self, rows: int) -> None:
        super().__init__(CONFIG)
        self.rows = rows
        self.seen: list[set[int]] = []

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), batch_size=self.rows)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(set(batch["input_ids"][:, 0].tolist()))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=ADAM_EPS)


def _run(at: At) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    reports = Reports()
    module = Trained(ROWS // STEPS * at.cp // at.world)
    fitted = trainer(
        MoEEPStrategy(ep=at.ep, cp=at.cp),
        max_epochs=1,
        gradient_clip_val=0.1,
        use_distributed_sampler=True,
        callbacks=[
            ExpertLoadMonitor(every_n_steps=1, heatmap_every_n_steps=0),
            ExpertBiasCallback(2**-9),
            SentinelCallback(every_n_steps=1),
            reports,
            *([SaveAt(STEPS // 2, at.save)] if at.save else []),
        ],
    )
    fitted.fit(module, ckpt_path=at.resume)
    layers = [layer for report in reports.reports for layer in report.layers]
    return {
        "seen": module.seen,
        "weights": plain(module.model, module.model.state_dict()),
        "loads": [layer.pairs.tolist() for layer in layers],
        "tokens": [layer.tokens for layer in layers],
        "probabilities": torch.tensor([layer.probabilities.tolist() for layer in layers]),
    }


@contract(
    "Restarts", "Resuming at another `cp`", "works, as at any layout; the same steps if batch sizes make up for it"
)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (At(2, cp=2, ep=2), At(2, cp=1, ep=2)),
        (At(1, cp=1), At(2, cp=2)),
        pytest.param(At(4, cp=2, ep=4), At(4, cp=4, ep=2), marks=pytest.mark.more),
    ],
    ids=["2 to 1", "1 to 2", "2 to 4"],
)
def test_a_training_goes_on_at_another_cp(ranks: RankPool, tmp_path: Path, first: At, second: At) -> None:
    (right,) = ranks.run(_run, At(1, cp=1), world=1)
    path = str(tmp_path / "c.ckpt")
    before = ranks.run(_run, replace(first, save=path), world=first.world)
    after = ranks.run(_run, replace(second, resume=path), world=second.world)
    assert record_of(Path(path))["layout"]["cp"] == first.cp

    for at, of_ranks, start in ((first, before, 0), (second, after, STEPS // 2)):
        seen = [set.union(*step) for step in zip(*(found["seen"] for found in of_ranks), strict=True)]
        assert seen == right["seen"][start:], at
        of_layers = slice(start * len(right["loads"]) // STEPS, None)
        for found in of_ranks:
            assert found["loads"] == right["loads"][of_layers] and found["tokens"] == right["tokens"][of_layers], at
            torch.testing.assert_close(found["probabilities"], right["probabilities"][of_layers], rtol=1e-4, atol=1e-6)
            error, name = worst(found["weights"], right["weights"])
            assert error < 1e-4, f"{at}: {name} is off by {error:.1e}"
    assert sum(right["loads"][0]) == ROWS // STEPS * LENGTH * CONFIG["num_experts_per_tok"]


class Adapted(Trained):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            layers = {"target_modules": ["q_b_proj", "o_proj"], "target_parameters": ["experts.gate_up_proj"]}
            self.model = get_peft_model(self.model, LoraConfig(r=2, init_lora_weights=False, **layers))


def _adapt(at: At, folder: str) -> dict[str, Tensor]:
    """On a rank: the whole weights; an adapter is left in the folder, and on rank 0 a merged model in one within it."""
    L.seed_everything(7, verbose=False)
    module = Adapted(ROWS // STEPS * at.cp // at.world)
    callbacks = [ShardedWeightAveraging(decay=0.5), *([SaveAt(STEPS // 2, at.save)] if at.save else [])]
    fitted = trainer(MoEEPStrategy(ep=at.ep, cp=at.cp), max_epochs=1, use_distributed_sampler=True, callbacks=callbacks)
    fitted.fit(module, ckpt_path=at.resume)
    module.model.save_pretrained(folder)
    if (merged := merged_model(module.model)) is not None:
        merged.save_pretrained(f"{folder}/merged")
    return plain(module.model, module.model.state_dict())


@pytest.mark.more
def test_an_adapter_goes_on_at_another_cp(ranks: RankPool, tmp_path: Path) -> None:
    """With averages of its weights, which are what is left in the end."""
    (right,) = ranks.run(_adapt, At(1, cp=1), str(tmp_path / "right"), world=1)
    path = str(tmp_path / "c.ckpt")
    at_cp = ranks.run(_adapt, At(2, cp=2, ep=2, save=path), str(tmp_path / "at cp"), world=2)
    after = ranks.run(_adapt, At(1, cp=1, resume=path), str(tmp_path / "after"), world=1)
    for found in (*at_cp, *after):
        error, name = worst(found, right)
        assert error < 1e-4, f"{name} is off by {error:.1e}"
    for file in ("adapter_model.safetensors", "merged/model.safetensors"):
        theirs = load_file(tmp_path / "right" / file)
        for folder in ("at cp", "after"):
            error, name = worst(load_file(tmp_path / folder / file), theirs)
            assert error < 1e-4, f"{folder}: {name} in {file} is off by {error:.1e}"


def _again() -> str:
    module = Trained(1)
    trainer(MoEEPStrategy(ep=1, cp=2), max_steps=1).fit(module)
    try:
        trainer(MoEEPStrategy(ep=1, cp=1), max_steps=1).fit(module)
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_that_is_parallel_already_keeps_its_cp(ranks: RankPool) -> None:
    for text in ranks.run(_again, world=2):
        assert text == (
            "the model is parallel already, with attention for cp=2, but this strategy has cp=1; use the same cp, or"
            " build the model anew and load a checkpoint"
        )
