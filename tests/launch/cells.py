"""The cells of a notebook, one function each; `test_forked` runs them in an interactive process, as a notebook's is.

Each meets what those before it left in the process: process groups, sharded modules, threads.
"""

from __future__ import annotations

import csv
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.launch import weights
from lightning_moe_ep.launch.forked import ForkLauncher, RankError
from tests.list_models import BLOCKS
from tests.models import HIDDEN, build, loss_of, make_batch

LIST = next(iter(BLOCKS))
"""A model with its experts in a list."""

ROWS = [{name: value[0] for name, value in make_batch("own", 1, seed=seed).items()} for seed in range(64)]


def loader() -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=8)


def trainer(devices: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    strategy = MoEEPStrategy(ep=devices, **options.pop("strategy", {}))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_epochs": 1}
    options = {"enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks), **quiet, **options}
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, callbacks=list(callbacks), **options)


class Module(L.LightningModule):
    def __init__(self, kind: str = "own") -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        self.model = build(self.kind)

    def on_train_start(self) -> None:
        # Large enough for all threads that torch may use: those of OpenMP do not survive a fork.
        torch.ones(1_000_000, requires_grad=True).exp().sum().backward()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", loss_of(self.model, batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["x"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class BuiltBefore(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = build("own")

    configure_model = L.LightningModule.configure_model


def loss_here(module: L.LightningModule) -> float:
    """By the plain module, in this process."""
    with torch.no_grad():
        return float(sum(loss_of(module.model, batch) for batch in loader()) / len(loader()))


def is_close(one: Any, other: Any, tolerance: float = 1e-5) -> bool:
    return abs(float(one) - float(other)) < tolerance * abs(float(other))


kept: dict[str, Any] = {}


def one_device() -> None:
    """Every loop, in this process; it leaves a process group, and threads."""
    saving = ModelCheckpoint(dirpath="one", save_last=True)
    runs, module = trainer(1, saving), Module()
    runs.fit(module, loader(), loader())
    assert not isinstance(runs.strategy.launcher, ForkLauncher) and dist.get_world_size() == 1
    loss = runs.validate(module, loader())[0]["loss"]
    assert runs.test(module, loader())[0]["loss"] == loss
    predicted = torch.cat(runs.predict(module, loader()))
    assert predicted.shape == (len(ROWS), HIDDEN)
    kept.update(one=module, last=saving.last_model_path, loss=loss)


def two_ranks() -> None:
    """After it: resumed from its checkpoint; everything that the user holds is as after a run in this process."""
    saving = ModelCheckpoint(dirpath="two", monitor="loss")
    stopping = EarlyStopping("loss", patience=5)
    runs = trainer(2, saving, stopping, max_epochs=3, strategy={"save_distributed_checkpoint": False})
    module = Module()
    before = torch.get_rng_state(), dict(os.environ)
    runs.fit(module, loader(), loader(), ckpt_path=kept["last"])
    assert torch.equal(torch.get_rng_state(), before[0]) and dict(os.environ) == before[1]
    assert (runs.global_step, runs.current_epoch) == (8 + 2 * 4, 3)
    assert runs.state.finished and runs.state.stage is None and module.trainer is runs
    assert runs.callback_metrics["loss"] < kept["loss"] and runs.logged_metrics["train_loss"] > 0
    assert saving.best_model_score == runs.callback_metrics["loss"] == stopping.best_score
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    saved = torch.load(saving.best_model_path, weights_only=False)["state_dict"]
    assert {name: value.tolist() for name, value in module.state_dict().items()} == {
        name: value.tolist() for name, value in saved.items()
    }
    assert is_close(loss_here(module), runs.callback_metrics["loss"])
    kept.update(runs=runs, module=module, saving=saving)


def the_same_trainer_again() -> None:
    runs, module = kept["runs"], kept["module"]
    loss = float(runs.callback_metrics["loss"])
    assert is_close(runs.validate(module, loader())[0]["loss"], loss)
    assert is_close(runs.test(dataloaders=loader(), ckpt_path="best")[0]["loss"], loss)

    class Writer(BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            torch.save((predictions, batch_indices), f"predicted-{trainer.global_rank}")

    with pytest.raises(Exception, match="`return_predictions` should be set to `False`"):
        runs.predict(module, loader(), return_predictions=True)
    runs.callbacks.append(Writer("epoch"))
    assert runs.predict(module, loader()) is None
    indices = [i for rank in range(2) for batch in torch.load(f"predicted-{rank}")[1][0] for i in batch]
    assert sorted(indices) == list(range(len(ROWS)))

    runs.fit_loop.max_epochs = 4
    runs.fit(module, loader(), loader())
    assert (runs.global_step, runs.current_epoch) == (20, 4)
    assert is_close(loss_here(module), runs.callback_metrics["loss"])
    assert loss_here(module) < loss
    path = Path("by-hand.ckpt")
    with pytest.warns(UserWarning, match=r"by-hand.ckpt has weights only"):
        runs.save_checkpoint(path)
    # And back on one device, from the checkpoint and from the module.
    for source in ({"model": Module(), "ckpt_path": path}, {"model": module}):
        again = trainer(1).validate(dataloaders=loader(), **source)[0]["loss"]
        assert is_close(again, runs.callback_metrics["loss"])


def built_in_init() -> None:
    """The user's references to its parameters stay right; experts in lists come back under their own names."""
    module = BuiltBefore()
    weight = module.model.head.weight
    values = weight.detach().clone()
    runs = trainer(2)
    runs.fit(module, loader(), loader())
    assert module.model.head.weight is weight and not torch.equal(weight, values)
    assert is_close(loss_here(module), runs.callback_metrics["loss"])


def a_sharded_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match="this Module was sharded by a run on one device"):
        trainer(2).fit(kept["one"], loader())


def failures() -> None:
    """A rank's own exception, a killed rank, an interrupted cell: each ends all, and the next run works."""
    module = BuiltBefore()
    before = loss_here(module)

    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_rank == 1 and batch_idx == 2:
                self.fail()
            return super().training_step(batch, batch_idx)

        def fail(self) -> None:
            raise OverflowError("too much on rank 1")

    class Dies(Fails):
        def fail(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    with ended_within(10), pytest.raises(OverflowError, match="too much on rank 1") as raised:
        trainer(2).fit(Fails(), loader())
    cause = str(raised.value.__cause__)
    assert cause.startswith("on rank 1 of 2:") and "in fail" in cause
    with ended_within(10), pytest.raises(RankError, match=r"rank 1 of 2 was killed by SIGKILL \(exit code -9\)"):
        trainer(2).fit(Dies(), loader())

    class Slow(BuiltBefore):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            Path(f"started-{self.global_rank}").touch()
            time.sleep(60)
            raise AssertionError

        def on_exception(self, *args: Any) -> None:
            raise AssertionError

    class Told(L.Callback):
        def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
            Path(f"told-{os.getpid()}-{type(error).__name__}").touch()

    def interrupt() -> None:
        while not all(Path(f"started-{rank}").exists() for rank in range(2)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    slow = Slow()
    slow.load_state_dict(module.state_dict())
    with ended_within(20), pytest.raises(SystemExit), pytest.warns(UserWarning, match="The fit did not end"):
        trainer(2, Told(), OnExceptionCheckpoint("."), max_epochs=2).fit(slow, loader())
    assert len(list(Path().glob("told-*-KeyboardInterrupt"))) == 3  # the ranks and this process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as IPython does before each cell
    assert loss_here(slow) == before
    runs = trainer(2)
    runs.fit(module, loader(), loader())
    assert is_close(loss_here(module), runs.callback_metrics["loss"])


@contextmanager
def ended_within(seconds: float) -> Any:
    """Inside, a run ends in time and leaves no process."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    assert not children.exists() or not children.read_text().split()


def weights_that_stay_away() -> None:
    """Too many to be copied, or a module that cannot be built here: a checkpoint instead, and never stale weights."""
    module = Module()
    limit, weights.MOST_BYTES = weights.MOST_BYTES, 1000
    runs = trainer(2)
    with pytest.warns(UserWarning, match=r"The trained weights are in .*trained_weights.ckpt, not in the module"):
        runs.fit(module, loader(), loader())
    loss = float(runs.callback_metrics["loss"])
    assert not hasattr(module, "model")
    with pytest.raises(RuntimeError, match=r"give ckpt_path='.*trained_weights.ckpt'"):
        runs.validate(module, loader())
    with pytest.raises(RuntimeError, match="the trained weights are not in this process"):
        runs.save_checkpoint("nothing.ckpt")
    with pytest.raises(RuntimeError, match=r"give ckpt_path='.*trained_weights.ckpt'"):
        trainer(1).validate(module, loader())
    weights.MOST_BYTES = limit
    path = Path("trained_weights.ckpt")
    assert is_close(runs.validate(module, loader(), ckpt_path=path)[0]["loss"], loss)
    assert is_close(loss_here(module), loss)
    longer = trainer(2, max_epochs=2)
    longer.fit(Module(), loader(), ckpt_path=path)  # with the optimizer's state
    assert longer.global_step == 8

    class KnowsInRanksOnly(Module):
        def setup(self, stage: str) -> None:
            self.size = 8

        def configure_model(self) -> None:
            self.model = build("own", num_experts=2)
            self.model = build("own", num_experts=self.size)

    other = KnowsInRanksOnly()
    with pytest.warns(UserWarning, match=r"trained_weights-v1.ckpt, not in the module of this process: Attrib"):
        runs.fit(other, loader(), loader())
    assert not hasattr(other, "model") and is_close(
        runs.validate(KnowsInRanksOnly(), loader(), ckpt_path="trained_weights-v1.ckpt")[0]["loss"],
        runs.callback_metrics["loss"],
    )
    assert not Path("trained_weights-v2.ckpt").exists()


def names_and_meta() -> None:
    """Experts in a list have names of their own; from the meta device comes a real model; bf16 stays bf16."""
    for kind, options in (
        ("mixtral", {"strategy": {"init_on_meta": True}}),
        ("own", {"precision": "bf16-true"}),
        (LIST, {}),
    ):
        module, runs = Module(kind), trainer(2, **options)
        kind = "own" if kind == LIST else kind
        rows = DataLoader([make_batch(kind, 16, seed=seed) for seed in range(8)], batch_size=None)
        runs.fit(module, rows, rows)
        dtypes = {parameter.dtype for parameter in module.parameters()}
        assert dtypes == {torch.bfloat16 if "precision" in options else torch.float32}
        here = sum(loss_of(module.model.float(), batch).item() for batch in rows) / len(rows)
        tolerance = 0.05 if "precision" in options else 1e-5
        assert is_close(here, runs.callback_metrics["loss"], tolerance)
        assert set(module.state_dict()) == {f"model.{name}" for name in build(module.kind).state_dict()}


def loggers() -> None:
    """Their folders are numbered in this process, and one run goes on in the file of another."""
    logger = CSVLogger(".", flush_logs_every_n_steps=1)
    board = TensorBoardLogger(".", name="board", max_queue=2)
    board.experiment.add_scalar("here", 1.0)  # with a thread, which the ranks do not have
    runs, module = trainer(2, logger=[logger, board], log_every_n_steps=1), BuiltBefore()
    runs.fit(module, loader(), loader())
    assert len(list(Path(board.log_dir).glob("events.*"))) == 2
    fitted = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    assert "train_loss" in fitted[0]
    runs.test(module, loader())
    assert Path(logger.log_dir, "metrics.csv").read_text().splitlines()[: len(fitted)] == fitted
    runs.fit_loop.max_epochs = 2
    runs.fit(module, loader(), loader())
    rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(8))


class Drawn(Dataset[dict[str, Tensor]]):
    """Samples with noise: what the loaders' workers draw, of Python's, NumPy's and torch's numbers."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])
        return {"drawn": drawn, "x": ROWS[index]["x"] * drawn.sum(), "y": ROWS[index]["y"]}


class Noisy(Module):
    """Draws numbers in its step as well."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.drawn: list[list[float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.drawn += batch.pop("drawn").tolist()
        loss = super().training_step({**batch, "x": F.dropout(batch["x"])}, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_fit_end(self) -> None:
        number = len(list(Path().glob(f"*-run-of-{self.global_rank}")))
        torch.save((self.losses, self.drawn), f"{number}-run-of-{self.global_rank}")


def seeds() -> None:
    """A run whose losses hang on everything that is drawn."""
    L.seed_everything(11, workers=True)
    trainer(2, max_epochs=2).fit(Noisy(), DataLoader(Drawn(), batch_size=4, shuffle=True, num_workers=2))
    del os.environ["PL_SEED_WORKERS"]


CELLS: dict[str, Callable[[], None]] = {
    cell.__name__: cell
    for cell in (
        one_device,
        two_ranks,
        the_same_trainer_again,
        built_in_init,
        a_sharded_module_is_refused,
        failures,
        weights_that_stay_away,
        names_and_meta,
        loggers,
        seeds,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(2 if hasattr(sys, "ps1") else 1)
    L.seed_everything(5)
    for name in sys.argv[1:]:
        start = time.monotonic()
        CELLS[name]()
        print(f"ran {name} in {time.monotonic() - start:.1f} s", flush=True)
