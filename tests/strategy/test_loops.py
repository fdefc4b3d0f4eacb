"""fit, validate, test and predict: each alone, from a checkpoint, and in any order on one Trainer and module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

from lightning_moe_ep import MoEEPStrategy
from tests.contract import contract
from tests.models import loss_of, make_batch
from tests.parity import Case, CaseModule, trainer, whole, worst
from tests.pool import RankPool

CASE = Case(steps=2)


class AllLoops(CaseModule):
    """Has every loop, on other data on each rank; metrics as modules."""

    def __init__(self) -> None:
        super().__init__(CASE)
        self.loss = MeanMetric()
        self.errors = MetricCollection({"mse": MeanSquaredError(), "other": MeanSquaredError(squared=False)})
        self.built = 0

    def configure_model(self) -> None:
        super().configure_model()
        self.built += 1

    def _loader(self) -> DataLoader:
        return DataLoader([make_batch("own", 8, seed=100 + dist.get_rank())], batch_size=None)

    val_dataloader = test_dataloader = predict_dataloader = _loader

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch)

    def _evaluate(self, batch: dict[str, Tensor]) -> None:
        self.loss.update(loss_of(self.model, batch))
        self.errors.update(self.model(batch["x"]), batch["y"])
        self.log("loss", self.loss)
        self.log_dict(self.errors)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["x"])

    @property
    def weights(self) -> dict[str, Tensor]:
        return whole(dict(self.model.named_parameters()))


def as_on_gpus() -> AbstractContextManager[Any]:
    """Lightning evaluates in inference mode on all backends but gloo."""
    return patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False)


def _any_order(folder: str, inference_mode: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    L.seed_everything(7, verbose=False)
    keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
    module = AllLoops()
    one = trainer(MoEEPStrategy(), max_epochs=1, callbacks=[keep], enable_checkpointing=True, num_sanity_val_steps=0)
    with as_on_gpus() if inference_mode else nullcontext():
        (untrained,) = one.predict(module)
        (found["validated first"],) = one.validate(module, verbose=False)
        one.fit(module)
        found["steps"] = [one.global_step]
        (found["tested"],) = one.test(module, verbose=False)
        (trained,) = one.predict(module)
        found["predict changed"] = not torch.equal(untrained, trained)
        after_one = module.weights
        (found["validated"],) = one.validate(module, verbose=False)
        found["kept"] = worst(module.weights, after_one)[0]
        one.fit_loop.max_epochs += 1
        one.fit(module)
        found["steps"].append(one.global_step)
        found["moved"] = worst(module.weights, after_one)[0]
        (found["validated after two"],) = one.validate(module, verbose=False)
        first = str(Path(folder, "step=2.ckpt"))
        (found["validated from the first"],) = one.validate(module, ckpt_path=first, verbose=False)
        found["back"] = worst(module.weights, after_one)[0]
        (found["tested from the best"],) = one.test(module, ckpt_path="best", verbose=False)
        # Goes on from the checkpoint of the first epoch, so the second is trained once more.
        one.fit(module, ckpt_path=first)
        found["steps"].append(one.global_step)
        found["built"] = module.built
        # Each alone, on a new Trainer and module.
        alone = lambda: trainer(MoEEPStrategy(), max_epochs=2, num_sanity_val_steps=0)  # noqa: E731
        (found["validate alone"],) = alone().validate(AllLoops(), ckpt_path=first, verbose=False)
        (found["test alone"],) = alone().test(AllLoops(), ckpt_path=first, verbose=False)
        (predicted,) = alone().predict(AllLoops(), ckpt_path=first)
        found["predict alone"] = float((predicted - trained).abs().max())
        fitting, other = alone(), AllLoops()
        fitting.fit(other, ckpt_path=first)
        found["steps"].append(fitting.global_step)
        found["fit alone"] = worst(other.weights, module.weights)[0]
    return found


@contract("Loops", "`fit`, `validate`, `test`, `predict`, each alone, also with `ckpt_path`")
@contract("Loops", "All of them in any order on one Trainer and module; `fit` again with more epochs")
@contract("Loops", "Evaluation before training on NCCL", "works; inference mode is off")
@contract("Data", "torchmetrics' modules inside the LightningModule")
@pytest.mark.parametrize("inference_mode", [False, True], ids=["gloo", "as NCCL"])
def test_loops_in_any_order(ranks: RankPool, tmp_path: Path, inference_mode: bool) -> None:
    first, second = ranks.run(_any_order, str(tmp_path), inference_mode, world=2)
    assert first["steps"] == [2, 4, 4, 4] and first["built"] == 1 and first["predict changed"]
    assert first["kept"] == first["back"] == 0 and first["moved"] > 1e-4
    assert first["fit alone"] == 0 and first["predict alone"] < 1e-6
    for same in ("tested", "validated from the first", "validate alone", "test alone"):
        assert first[same] == pytest.approx(first["validated"]), same
    assert first["validated"] == second["validated"] and set(first["validated"]) == {"loss", "mse", "other"}
    assert first["tested"]["mse"] * 10 == pytest.approx(first["tested"]["loss"]), "one of them is not over all ranks"
    assert first["validated after two"]["loss"] != first["validated"]["loss"] != first["validated first"]["loss"]
