"""What the load monitor says of a training, against a count of the routing in one process."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_ep import ExpertAlert, ExpertLoadMonitor, MoEEPStrategy, register_dispatcher
from lightning_moe_ep.callbacks import LoadReport, monitor
from lightning_moe_ep.dispatch import AllGatherDispatcher, ExpertGroup
from lightning_moe_ep.rows import RoutingStatistics
from tests.callbacks.test_balance import Initial
from tests.dispatch.test_base import CountSyncs
from tests.matrix import mostly_more
from tests.models import HIDDEN, OwnModel, SameExpertRouter, loss_of, make_batch
from tests.oracle import reference_model
from tests.parity import Case, CaseModule, trainer
from tests.pool import RankPool

E, K = 8, 2
TWO = Case(steps=5, tokens=((16, 5), (7, 0)))
"""Two micro-batches a step; a rank has no tokens in the second."""
EVERY = 2
SUMMED = 2 * (E + 2 + 3 * (E + 1) + 5)
"""Numbers that are summed for a report of two layers on two ranks: small."""


class Still(CaseModule):
    """Learns nothing, so that its routing is that of its initial weights."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Validated(Still):
    """Validates after each batch."""

    def val_dataloader(self) -> DataLoader:
        return DataLoader([make_batch("own", 40, seed=99)], batch_size=None)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss_of(self.model, batch)


class InEvalMode(Validated):
    """Trains so, as one may; nothing is recomputed then."""

    def on_train_start(self) -> None:
        self.model.eval()


class Manual(Still):
    """Two optimizers, that both step after each micro-batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.manual_backward(loss_of(self.model, batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.parameters())
        return [torch.optim.SGD(part, lr=0.0) for part in (parameters[:5], parameters[5:])]


class Reports(L.Callback):
    """Keeps all reports, and what the progress bar has."""

    def __init__(self) -> None:
        self.reports: list[LoadReport] = []
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        (watching,) = (c for c in trainer.callbacks if isinstance(c, ExpertLoadMonitor))
        if watching.report is not None and watching.report not in self.reports:
            self.reports.append(watching.report)
            self.shown.append(dict(trainer.progress_bar_metrics))


def right(case: Case, initial: dict[str, Tensor], window: range) -> list[dict[str, Any]]:
    """One process, for each layer: the routing of these steps, in plain Python."""
    model = reference_model(case.kind, case.model, initial)
    layers = []
    for block in model.blocks:
        layer: dict[str, Any] = {"pairs": [0] * E, "probabilities": torch.zeros(E), "rank_pairs": [0, 0], "rows": 0}
        layer["tokens"] = 0
        layers.append(layer)

        def look(module: Any, args: tuple[Tensor], output: Any, layer: dict[str, Any] = layer) -> None:
            logits = (args[0].double() @ module.weight.double().T).tolist()
            for number, of_token in enumerate(logits):
                total = sum(map(math.exp, of_token))
                layer["probabilities"] += torch.tensor([math.exp(x) / total for x in of_token])
                chosen = sorted(range(E), key=lambda e, of_token=of_token: -of_token[e])[:K]
                assert sorted(chosen) == sorted(output[2][number].tolist())
                for expert in chosen:
                    layer["pairs"][expert] += 1
                    layer["rank_pairs"][expert // (E // case.ep)] += 1
                layer["rows"] += sum(expert // (E // 2) != look_rank[0] for expert in {e // 4 * 4 for e in chosen})
                layer["tokens"] += 1

        block.moe.router.register_forward_hook(look)
    look_rank = [0]
    for step in window:
        for look_rank[0], batches in enumerate(case.batches()[step]):
            for batch in batches:
                loss_of(model, batch)
    return layers


def _watched(
    case: Case, kind: type[CaseModule], strategy: str | None, folder: Path | None, options: dict[str, Any]
) -> dict[str, Any]:
    initial, reports = Initial(), Reports()
    watching = ExpertLoadMonitor(every_n_steps=EVERY, heatmap_every_n_steps=3 if folder else 0, log_experts=True)
    loggers = [CSVLogger(folder, "csv", ""), TensorBoardLogger(folder, "tensorboard", "")] if folder else False
    L.seed_everything(7, verbose=False)
    fit = trainer(
        strategy or MoEEPStrategy(ep=case.ep, **{"dispatcher": "all_to_all", **case.strategy}),
        max_epochs=1,
        log_every_n_steps=1,
        logger=loggers,
        default_root_dir=folder,
        callbacks=[watching, initial, reports],
        **({} if kind is Manual else {"accumulate_grad_batches": len(case.tokens[0])}),
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        sums: list[Any] = []
        original = dist.all_reduce
        patch.setattr(
            dist, "all_reduce", lambda t, *a, **k: (sums.append((t.numel(), t.dtype)), original(t, *a, **k))[1]
        )
        fit.fit(kind(case))
    assert watching._counter is None
    return {
        "initial": initial.state,
        "reports": reports.reports,
        "shown": reports.shown,
        "sums": sums.count((SUMMED, torch.float64)),
        "metrics": {name: float(value) for name, value in fit.callback_metrics.items()},
    }


def compare(report: LoadReport, layers: list[dict[str, Any]], case: Case, *, exchanges: bool) -> None:
    assert [layer.name for layer in report.layers] == ["blocks.0", "blocks.1"]
    for ours, theirs in zip(report.layers, layers, strict=True):
        assert ours.pairs.tolist() == theirs["pairs"]
        assert ours.tokens == theirs["tokens"]
        right_probabilities = theirs["probabilities"] / theirs["tokens"]
        assert ours.probabilities == pytest.approx(right_probabilities.numpy(), rel=1e-5)
        if exchanges:
            assert ours.pairs_of_rank.tolist() == theirs["rank_pairs"]
            assert ours.rows_sent == theirs["rows"] / report.steps
            assert ours.bytes_sent == theirs["rows"] * HIDDEN * (4 + 4) / report.steps
        else:
            assert ours.rows_sent is None and ours.bytes_sent is None
        shares = [n / sum(theirs["pairs"]) for n in theirs["pairs"] if n]
        scalars = ours.scalars()
        assert scalars["imbalance"] == max(shares) * E
        assert scalars["entropy"] == pytest.approx(-sum(s * math.log(s) for s in shares) / math.log(E))
        assert scalars["dead"] == theirs["pairs"].count(0)
        assert scalars["probability"] == pytest.approx(float(right_probabilities.max()) * E, rel=1e-5)


def test_numbers_and_loggers(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_watched, TWO, Still, None, tmp_path, {}, world=2)
    initial = results[0]["initial"]
    layers = [right(TWO, initial, window) for window in (range(0, 2), range(2, 4))]
    for result in results:
        assert [(report.step, report.steps) for report in result["reports"]] == [(2, 2), (4, 2)]
        assert result["sums"] == 2, "one sum over the world for each report"
        for report, of_report in zip(result["reports"], layers, strict=True):
            compare(report, of_report, TWO, exchanges=True)
    report = results[0]["reports"][1]
    assert repr(report) == repr(results[1]["reports"][1])

    # What imbalance costs, by the model's sizes: experts of 3 H I, a router, a shared expert of 3 H 32, a head.
    expert, dense = 3 * HIDDEN * 48, 2 * (E * HIDDEN + 3 * HIDDEN * 32) + HIDDEN * HIDDEN
    slowest = [max(layer["rank_pairs"]) * expert for layer in layers[1]]
    mean = [sum(layer["rank_pairs"]) / 2 * expert for layer in layers[1]]
    tokens = layers[1][0]["tokens"] / 2
    cost = (sum(slowest) - sum(mean)) / (sum(slowest) + tokens * dense)
    scalars = report.scalars(of_experts=True)
    assert scalars["experts/imbalance_cost"] == pytest.approx(cost)
    assert scalars["experts/rank_imbalance"] == max(s / m for s, m in zip(slowest, mean, strict=True))
    assert scalars["experts/rows_sent"] == sum(layer["rows"] for layer in layers[1]) / 2
    assert scalars["experts_pairs/blocks.1/3"] == layers[1][1]["pairs"][3]

    assert results[0]["metrics"]["experts/imbalance"] == pytest.approx(scalars["experts/imbalance"])
    assert results[1]["metrics"].keys() >= scalars.keys()
    assert results[0]["shown"][1]["experts/imbalance"] == pytest.approx(scalars["experts/imbalance"])
    assert results[0]["shown"][1]["experts/dead"] == scalars["experts/dead"]
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["experts/imbalance"]]
    assert [int(row["step"]) for row in rows] == [1, 3]
    assert {name: float(rows[1][name]) for name in scalars} == pytest.approx(scalars)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("experts_entropy/blocks.0")[1].value == pytest.approx(report.layers[0].entropy)
    # After step 4, the first report after step 3; the end has nothing newer.
    (image,) = events.Images("experts/load")
    assert image.step == 3
    assert image.width > 300 and image.height > 150
    (picture,) = (tmp_path / "csv" / "expert_load").iterdir()
    assert picture.name == "step=00000004.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size < 60_000


@register_dispatcher("counts_nothing")
class CountsNothing(AllGatherDispatcher):
    """As one may be that a user wrote."""

    def __init__(self, expert_group: ExpertGroup) -> None:
        super().__init__(replace(expert_group, statistics=RoutingStatistics()))


VARIANTS: dict[str, tuple[Case, type[CaseModule], str | None, dict[str, Any]]] = {
    "validation, recomputation": (
        Case(steps=2, tokens=TWO.tokens, strategy={"activation_checkpointing": "full"}),
        Validated,
        None,
        {"val_check_interval": 1},
    ),
    "DDP, trained in eval mode": (
        Case(ep=1, steps=2, tokens=((16, 5), (7, 9))),
        InEvalMode,
        "ddp",
        {"val_check_interval": 1},
    ),
    "recomputation that remembers": (
        Case(steps=2, tokens=TWO.tokens, strategy={"activation_checkpointing": "selective"}),
        Still,
        None,
        {},
    ),
    "manual optimization": (Case(steps=2, tokens=((16,), (7,))), Manual, None, {}),
    "compiled": (Case(steps=2, tokens=TWO.tokens, strategy={"compile_blocks": True}), Still, None, {}),
    "a dispatcher that counts nothing": (
        Case(steps=2, tokens=TWO.tokens, strategy={"dispatcher": "counts_nothing"}),
        Still,
        None,
        {},
    ),
    "ep 1": (Case(ep=1, steps=2, tokens=TWO.tokens), Still, None, {}),
    "ep 1, compiled": (Case(ep=1, steps=2, tokens=TWO.tokens, strategy={"compile_blocks": True}), Still, None, {}),
}


@pytest.mark.parametrize("name", mostly_more(VARIANTS, "validation, recomputation", "DDP, trained in eval mode"))
def test_what_counts(ranks: RankPool, name: str) -> None:
    case, kind, strategy, options = VARIANTS[name]
    results = ranks.run(_watched, case, kind, strategy, None, options, world=2)
    layers = right(case, results[0]["initial"], range(0, 2))
    for result in results:
        (report,) = result["reports"]
        counts = case.strategy.get("dispatcher") != "counts_nothing"
        compare(report, layers, case, exchanges=case.ep > 1 and counts)
        if not counts:
            assert all(layer.pairs_of_rank is None for layer in report.layers)
        if case.ep == 1:  # a rank's experts compute its own tokens
            of_ranks = [K * sum(of_rank) * case.steps for of_rank in case.tokens]
            assert [layer.pairs_of_rank.tolist() for layer in report.layers] == [of_ranks] * 2


# Alerts.


class Told(L.Callback):
    def __init__(self) -> None:
        self.alerts: list[ExpertAlert] = []

    def on_expert_alert(self, trainer: L.Trainer, pl_module: L.LightningModule, alert: ExpertAlert) -> None:
        self.alerts.append(alert)


class Collapsed(Still):
    """Every token goes to experts 0 and 1."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.alerts: list[ExpertAlert] = []

    def on_expert_alert(self, trainer: L.Trainer, pl_module: L.LightningModule, alert: ExpertAlert) -> None:
        self.alerts.append(alert)


def _alerted(folder: Path) -> dict[str, Any]:
    """A collapsed training of two steps, and of two more that go on from it."""
    found: dict[str, Any] = {"warnings": []}
    case = Case(kind="own_same_expert", steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "rank_zero_warn", lambda text: found["warnings"].append(text))
        for epochs, path in ((1, None), (2, folder / "last.ckpt")):
            told, module = Told(), Collapsed(case)
            watching = ExpertLoadMonitor(every_n_steps=1, heatmap_every_n_steps=0, dead_steps=3)
            fit = trainer(MoEEPStrategy(ep=2), max_epochs=epochs, callbacks=[watching, told])
            fit.fit(module, ckpt_path=path)
            found[f"alerts of {epochs}"] = told.alerts
            assert module.alerts == told.alerts
            if path is None:
                fit.save_checkpoint(folder / "last.ckpt")
    return found


def test_alerts_on_all_ranks_and_over_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(_alerted, tmp_path, world=2)
    assert first == second
    assert [(a.kind, a.layer, a.rank, a.step, a.value) for a in first["alerts of 1"]] == [
        ("rank_load", f"blocks.{layer}", 0, 1, 2.0) for layer in (0, 1)
    ]
    # The third step is the first of the second run; what was wrong already is looked at anew for ranks only.
    assert [a.step for a in first["alerts of 2"] if a.kind == "rank_load"] == [3, 3]
    dead = [alert for alert in first["alerts of 2"] if alert.kind == "dead_experts"]
    assert [(a.layer, a.experts, a.step, a.value) for a in dead] == [
        (f"blocks.{layer}", tuple(range(2, 8)), 3, 3.0) for layer in (0, 1)
    ]
    said = "(This is said once; ExpertLoadMonitor calls on_expert_alert for each)"
    assert first["warnings"] == [
        "rank 0 computed 2.00 times the mean of its ep group in blocks.0, up to step 1 (the bound is 1.5); it holds"
        f" experts 0 to 3. {said}",
        f"6 expert(s) of blocks.0 got no token for 3 steps, up to step 3: 2, 3, 4, 5, 6, 7. {said}",
    ]


# One process.


class Plain(L.LightningModule):
    def __init__(self, batches: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = OwnModel()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        return DataLoader([make_batch("own", 16, seed) for seed in range(self.batches)], batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_plain(
    folder: Path, watching: ExpertLoadMonitor, model: L.LightningModule | None = None, **options: Any
) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    fit = L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        max_epochs=1,
        **{"callbacks": [watching], "logger": False, "log_every_n_steps": 1, **quiet, **options},
    )
    fit.fit(model or Plain())
    return fit


def test_without_a_logger(tmp_path: Path) -> None:
    watching = ExpertLoadMonitor(heatmap_every_n_steps=100)
    fit = fit_plain(tmp_path, watching, log_every_n_steps=2)
    assert fit.callback_metrics["experts/imbalance"] > 1
    assert watching.report is not None and watching.report.step == 4
    assert [layer.pairs.sum() for layer in watching.report.layers] == [2 * 16 * K] * 2
    # The one at the end.
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")] == [
        "expert_load/step=00000004.png"
    ]


def test_another_fit_knows_nothing_of_the_one_before(tmp_path: Path) -> None:
    told, watching = Told(), ExpertLoadMonitor(every_n_steps=1, heatmap_every_n_steps=0, dead_steps=4)
    for batches, begun in ((3, []), (2, []), (4, [4, 4]), (4, [4, 4])):
        model = Plain(batches)
        for block in model.model.blocks:
            block.moe.router.__class__ = SameExpertRouter
        told.alerts.clear()
        fit_plain(tmp_path, watching, model, callbacks=[watching, told])
        assert [alert.step for alert in told.alerts] == begun


def test_fast_dev_run_leaves_nothing_behind(tmp_path: Path) -> None:
    watching = ExpertLoadMonitor()
    fit_plain(tmp_path, watching, fast_dev_run=2, logger=True)
    assert watching.report is not None and (watching.report.step, watching.report.steps) == (2, 1)
    assert list(tmp_path.iterdir()) == []


class TakesImages(Logger):
    name, version = "images", 0

    def __init__(self) -> None:
        super().__init__()
        self.images: list[tuple[str, Any, int]] = []
        self.metrics: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "experts/imbalance" in metrics:
            self.metrics.append(step or 0)

    def log_hyperparams(self, *_: Any) -> None:
        pass

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self.images += [(key, image, step or 0) for image in images]


def test_a_logger_that_takes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, drawn = TakesImages(), []
    original = FigureCanvasAgg.draw
    monkeypatch.setattr(FigureCanvasAgg, "draw", lambda self: (drawn.append(self), original(self)))
    fit_plain(tmp_path, ExpertLoadMonitor(heatmap_every_n_steps=2, dirpath=str(tmp_path / "mine")), logger=logger)
    assert logger.metrics == [0, 1, 2, 3]
    assert [(key, step) for key, _, step in logger.images] == [("experts/load", 1), ("experts/load", 3)]
    assert {image.shape[2] for _, image, _ in logger.images} == {3}
    files = sorted((tmp_path / "mine").iterdir())
    assert [path.name for path in files] == ["step=00000002.png", "step=00000004.png"]
    assert len(drawn) == 2, "drawing is what takes the time: once for the file and all loggers"
    assert ((imread(files[1])[:, :, :3] * 255).round() == logger.images[1][1]).all()


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "find_spec", lambda name: None)
    with pytest.warns(
        UserWarning, match=r"no heatmaps, as matplotlib is not installed: pip install lightning-moe-ep\[docs\]"
    ):
        fit = fit_plain(tmp_path, ExpertLoadMonitor(heatmap_every_n_steps=1))
    assert fit.callback_metrics["experts/imbalance"] > 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watching = ExpertLoadMonitor(heatmap_every_n_steps=4, dirpath=str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not write the heatmap of step 4"):
        fit_plain(tmp_path, watching)


def test_stops_on_its_metrics(tmp_path: Path) -> None:
    stopping = callbacks.EarlyStopping("experts/imbalance", check_on_train_epoch_end=True)
    watching = ExpertLoadMonitor(heatmap_every_n_steps=0)
    fit_plain(tmp_path, watching, callbacks=[watching, stopping])
    assert watching.report is not None
    assert float(stopping.best_score) == pytest.approx(watching.report.scalars(of_experts=False)["experts/imbalance"])


def test_steps_that_do_not_log_do_not_wait_for_the_device() -> None:
    model = OwnModel()
    loop = SimpleNamespace(_should_accumulate=lambda: False, epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    fake: Any = SimpleNamespace(
        world_size=1,
        global_rank=0,
        fit_loop=loop,
        log_every_n_steps=50,
        fast_dev_run=False,
        log_dir=".",
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    watching = ExpertLoadMonitor()
    watching.on_fit_start(fake, model)  # type: ignore[arg-type]
    with CountSyncs() as counter:
        watching.on_train_batch_start()
        for block in model.blocks:
            index = torch.randint(0, E, (9, K), device="cpu")
            logits, weights = torch.randn(9, E, device="cpu"), torch.rand(9, K, device="cpu")
            for hook in block.moe.router._forward_hooks.values():
                hook(block.moe.router, (None,), (logits, weights, index))
            for hook in block.moe.experts._forward_pre_hooks.values():
                hook(block.moe.experts, (None, index, weights), {})
        watching.on_train_batch_end(fake, model)  # type: ignore[arg-type]
    assert counter.syncs == []
    assert watching._counter is not None and watching._counter.loads().sum() == 2 * 9 * K
    assert watching._layers[0].scores is not None and watching._layers[0].scores.tokens == 9


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0 must be at least 1"),
        ({"dead_steps": 0}, "dead_steps=0 must be at least 1"),
        ({"heatmap_every_n_steps": -1}, "heatmap_every_n_steps=-1 must be at least 1, or 0 for no heatmaps"),
        ({"rank_load_bound": 0.5}, "rank_load_bound=0.5 must be at least 1"),
        ({"rank_load_bound": float("nan")}, "rank_load_bound=nan must be at least 1"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertLoadMonitor(**options)


def test_a_trainer_that_never_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"log_every_n_steps=0 makes never; give ExpertLoadMonitor\(every_n_steps=..."):
        fit_plain(tmp_path, ExpertLoadMonitor(), log_every_n_steps=0)
    watching = ExpertLoadMonitor(every_n_steps=4, heatmap_every_n_steps=0)
    fit_plain(tmp_path, watching, log_every_n_steps=0)
    assert watching.report is not None and watching.report.steps == 4
