"""Lightning's own callbacks, profilers and loggers, as people use them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.checkpoint import background
from tests.contract import contract
from tests.models import loss_of
from tests.parity import Case, CaseModule, trainer
from tests.pool import RankPool

STEPS = 4
UNLIKE = Case(steps=STEPS, tokens=((16,), (7,)))


class Usual(CaseModule):
    """Logs and validates, with a learning rate that falls each step."""

    lr = 1e-3

    def val_dataloader(self) -> DataLoader:
        return DataLoader([step[dist.get_rank()][0] for step in self.case.batches()][:2], batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.model, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _tags(folder: Path) -> set[str]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def _usual(folder: Path) -> dict[str, Any]:
    """On a rank: two epochs with what people put around a training."""
    module = Usual(UNLIKE)
    timer, saved = callbacks.Timer(), callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)
    often = callbacks.ModelCheckpoint(folder / "often", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    fit = trainer(
        MoEEPStrategy(ep=2),
        max_epochs=3,
        log_every_n_steps=1,
        logger=[CSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "tensorboard", "")],
        enable_checkpointing=True,
        profiler="simple",
        default_root_dir=folder,
        callbacks=[
            timer,
            saved,
            often,
            callbacks.LearningRateMonitor(),
            callbacks.DeviceStatsMonitor(cpu_stats=True),
            callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
        ],
    )
    fit.fit(module)
    return {
        "steps": fit.global_step,
        "seconds": timer.time_elapsed("train"),
        "best": (saved.best_model_path, float(saved.best_model_score)),
        "lr": module.optimizers().param_groups[0]["lr"],
    }


@contract("Callbacks", "`ModelCheckpoint`", "`save_top_k`, `every_n_train_steps`, `save_last`, `save_on_exception`")
@contract("Callbacks", "`LearningRateMonitor`, `DeviceStatsMonitor`, `Timer`")
@contract("Callbacks", "`GradientAccumulationScheduler`")
@contract("Loggers", "`TensorBoardLogger`, `CSVLogger`", "works, several at a time")
def test_what_people_put_around_a_training(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(_usual, tmp_path, world=2)
    assert first["steps"] == second["steps"] == STEPS + 2 * math.ceil(STEPS / 2)
    assert first["best"] == second["best"] and first["seconds"] > 0
    assert first["lr"] == pytest.approx(1e-3 * 0.1 ** first["steps"])
    assert len(list(tmp_path.glob("epoch=*.ckpt"))) == 2
    steps = sorted(int(path.name.partition("=")[2].partition(".")[0]) for path in (tmp_path / "often").glob("*.ckpt"))
    assert steps == list(range(2, first["steps"] + 1, 2))
    logged = {"loss", "val_loss", "grad_norm", "lr-AdamW"}
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        columns = set(csv.DictReader(file).fieldnames or ())
    assert columns >= logged and any(column.startswith("DeviceStatsMonitor") for column in columns)
    assert _tags(tmp_path / "tensorboard") >= logged


class Worsens(Usual):
    """A metric that gets worse on one rank only, and so in the mean."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        value = float(self.current_epoch) if dist.get_rank() == 1 else 0.0
        self.log("val_loss", value, sync_dist=True)


def _stops_early() -> tuple[int, int]:
    stopping = callbacks.EarlyStopping("val_loss", patience=2)
    fit = trainer(MoEEPStrategy(ep=2), max_epochs=9, callbacks=[stopping])
    fit.fit(Worsens(UNLIKE))
    return fit.current_epoch, stopping.stopped_epoch


@contract("Callbacks", "`EarlyStopping`", "all ranks stop at the same step")
def test_early_stopping(ranks: RankPool) -> None:
    assert ranks.run(_stops_early, world=2) == [(3, 2)] * 2


class Told(L.Callback):
    """Keeps what is logged for people."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        for module in ("lightning_moe_ep.strategy.logs.rank_zero_info",):
            monkeypatch.setattr(module, self.lines.append)


def _bars() -> tuple[list[str], int]:
    with pytest.MonkeyPatch.context() as patch:
        told = Told(patch)
        summary = callbacks.ModelSummary(max_depth=2)
        trainer(
            MoEEPStrategy(ep=2),
            max_epochs=1,
            enable_progress_bar=True,
            enable_model_summary=True,
            callbacks=[summary, callbacks.RichProgressBar()],
        ).fit(module := Usual(UNLIKE))
        trainer(MoEEPStrategy(ep=2), max_epochs=2, enable_progress_bar=True).fit(module)
        return told.lines, summary._summary(module.trainer, module).total_parameters


@contract("Callbacks", "progress bars (tqdm, rich)")
@contract(
    "Callbacks", "`ModelSummary`, `RichModelSummary`", "counts of the whole model; a line more has those of a rank"
)
def test_bars_and_summaries(ranks: RankPool) -> None:
    plain = Usual(UNLIKE)
    plain.configure_model()
    whole = sum(parameter.numel() for parameter in plain.parameters())
    experts = sum(p.numel() for name, p in plain.named_parameters() if ".experts." in name)
    here = (whole - experts + experts) // 2
    for lines, counted in ranks.run(_bars, world=2):
        assert counted == whole
        assert lines == [
            f"{whole / 1000:.0f} K parameters, {experts / 1000:.0f} K of them in experts; on this rank"
            f" {here / 1000:.1f} K and {experts / 2000:.1f} K"
        ]


def _profiled(name: str, folder: Path) -> int:
    fit = trainer(MoEEPStrategy(ep=2), max_steps=2, profiler=name, default_root_dir=folder, detect_anomaly=True)
    fit.fit(Usual(UNLIKE))
    return fit.global_step


@contract("Callbacks", "profilers: simple, advanced, PyTorch")
@pytest.mark.parametrize("name", ["advanced", "pytorch"])
def test_profilers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert ranks.run(_profiled, name, tmp_path, world=2) == [2, 2]


class Broken(Usual):
    """A gradient that is NaN."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * torch.zeros(()).sqrt().requires_grad_().sqrt() * 0 / 0


def _anomalous() -> str:
    with pytest.raises(RuntimeError) as raised:
        trainer(MoEEPStrategy(ep=2), max_steps=1, detect_anomaly=True).fit(Broken(UNLIKE))
    return str(raised.value)


@contract("Callbacks", "`detect_anomaly`")
def test_anomaly_detection(ranks: RankPool) -> None:
    assert all("returned nan values" in message for message in ranks.run(_anomalous, world=2))


def _found_rate() -> tuple[float, bool]:
    module = Usual(UNLIKE)
    fit = trainer(MoEEPStrategy(ep=2), max_epochs=1)
    finder = Tuner(fit).lr_find(module, num_training=4, early_stop_threshold=None)
    suggestion = finder.suggestion(skip_begin=0, skip_end=1)
    fit.fit(module)
    return suggestion, fit.global_step == STEPS


@contract("Callbacks", "`LearningRateFinder`, `Tuner.lr_find`", "all ranks find the same")
def test_learning_rate_finder(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, fitted), (second, too) = ranks.run(_found_rate, world=2)
    assert first == second and fitted and too


def _batch_size_finder() -> None:
    module = Usual(UNLIKE)
    module.batch_size = 2
    with pytest.raises(MisconfigurationException, match="Batch size finder is not supported with distributed"):
        trainer(MoEEPStrategy(ep=2), max_epochs=1, callbacks=[callbacks.BatchSizeFinder()]).fit(module)


@contract("Callbacks", "`BatchSizeFinder`", "refused with several devices, by Lightning: set the batch size yourself")
def test_batch_size_finder_is_refused(ranks: RankPool) -> None:
    ranks.run(_batch_size_finder, world=2)


class Logs(Usual):
    """Logs parts of tensors, and means over unlike batches."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        block = self.model.blocks[0]
        parts = {"experts": block.moe.experts.down_proj.max(), "router": block.moe.router.weight.norm()}
        assert all(isinstance(part, DTensor) and part.placements[0].is_partial() for part in parts.values())
        self.log_dict(parts, sync_dist=True, prog_bar=True)
        self.log("not synced", parts["experts"])
        self.right = {
            "experts": float(block.moe.experts.down_proj.full_tensor().max()),
            "router": float(block.moe.router.weight.full_tensor().norm()),
        }
        self.right["not synced"] = self.right["experts"]
        self.log("here", torch.tensor(float(dist.get_rank())))
        self.log("mean", float(dist.get_rank()), sync_dist=True)
        self.log("sum", dist.get_rank() + 1, sync_dist=True, reduce_fx="sum")
        tokens = len(batch["x"])
        self.log("by_tokens", float(tokens), on_step=False, on_epoch=True, sync_dist=True, batch_size=tokens)
        return loss


def _logged() -> tuple[dict[str, float], dict[str, float]]:
    module = Logs(UNLIKE)
    fit = trainer(MoEEPStrategy(ep=2), max_epochs=1, enable_progress_bar=True)
    fit.fit(module)
    return {name: float(value) for name, value in fit.callback_metrics.items()}, module.right


@contract(
    "Loggers",
    "`self.log`",
    "with and without `sync_dist`; of sharded tensors, which are made whole; weighted by tokens",
)
def test_what_is_logged(ranks: RankPool) -> None:
    for rank, (logged, right) in enumerate(ranks.run(_logged, world=2)):
        assert {name: logged[name] for name in right} == pytest.approx(right)
        assert (logged["here"], logged["mean"], logged["sum"]) == (rank, 0.5, 3.0)
        assert logged["by_tokens"] == pytest.approx((16 * 16 + 7 * 7) / (16 + 7))


class Raises(Usual):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise LookupError("the step raised")
        return super().training_step(batch, batch_idx)


def _after_exception(folder: Path, reason: str | None) -> tuple[list[str], int]:
    """On a rank: a fit that raises on all ranks, and one that goes on from what was saved then."""
    warnings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "rank_zero_warn", lambda text: warnings.append(text))
        if reason is not None:
            patch.setattr(background, "why_not_to_save", lambda step, groups: reason)
        saving = [
            callbacks.ModelCheckpoint(folder, save_on_exception=True, filename="{step}"),
            callbacks.OnExceptionCheckpoint(folder),
        ]
        fit = trainer(MoEEPStrategy(ep=2), max_epochs=1, enable_checkpointing=True, callbacks=saving)
        with pytest.raises(LookupError, match="the step raised"):
            fit.fit(Raises(UNLIKE))
    saved = sorted(path.name for path in folder.glob("step=*.ckpt"))
    if not saved:
        return warnings, -1
    again = trainer(MoEEPStrategy(ep=2), max_epochs=1)
    again.fit(Usual(UNLIKE), ckpt_path=folder / saved[0])
    return saved, again.global_step


@contract(
    "Callbacks",
    "`OnExceptionCheckpoint`, `ModelCheckpoint(save_on_exception=True)`",
    "save if all ranks are there to, and say so if not",
)
def test_checkpoints_after_an_exception(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert ranks.run(_after_exception, tmp_path / "a", None, world=2) == [(["step=2.ckpt"], STEPS)] * 2
    for warnings, step in ranks.run(_after_exception, tmp_path / "b", "rank 1 is gone", world=2):
        assert step == -1
        assert warnings == [
            f"After the LookupError, {name} has not saved: rank 1 is gone"
            for name in ("ModelCheckpoint", "OnExceptionCheckpoint")
        ]
