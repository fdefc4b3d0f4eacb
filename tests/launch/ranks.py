"""Two ranks whose fit goes wrong, as processes that may die; forked from one that has imported everything."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy, MoELayer
from lightning_moe_ep.launch import guard
from tests.forks import CONTEXT
from tests.parity import trainer

HIDDEN, AT = 8, 2
"""Which step goes wrong."""


class Module(L.LightningModule):
    def __init__(self, how: str, victim: int) -> None:
        super().__init__()
        self.how, self.victim = how, victim

    def configure_model(self) -> None:
        self.moe = MoELayer(HIDDEN, num_experts=4, top_k=2, intermediate_size=HIDDEN)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(16, HIDDEN), batch_size=4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == AT and self.how == "alike":
            raise ValueError(f"all of us, rank {self.global_rank} too")
        if batch_idx == AT and self.global_rank == self.victim:
            self._go_wrong()
        return self.moe(batch).pow(2).mean()

    def _go_wrong(self) -> None:
        if self.how in ("raise", "hold"):
            raise KeyError("boom")
        if self.how == "exit":
            sys.exit(0)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "sleep":
            print("sleeps", flush=True)
            time.sleep(1000)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OnException(L.Callback):
    """Says that it was called; may wait as one that saves with all ranks."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        print("on_exception", flush=True)
        if self.waits:
            time.sleep(1000)


def fit(how: str, victim: int, timeout: timedelta) -> None:
    callback = OnException(waits=how == "raise and wait" and dist.get_rank() == victim)
    strategy = MoEEPStrategy(ep=2, timeout=timeout)
    trainer(strategy, max_epochs=1, callbacks=[callback]).fit(Module(how.split()[0], victim))


def run(rank: int, folder: Path, plan: list[tuple[str, int]], timeout: timedelta) -> None:
    """A rank; `plan` has how each fit goes wrong, and where."""
    if plan[0][0] == "hold":
        guard.GRACE = 1.0
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timeout)
    for how, victim in plan:
        try:
            fit(how, victim, timeout)
            print("fitted", flush=True)
        except Exception as error:
            print(f"caught {type(error).__name__}: {error}", flush=True)
            if how == "hold" and rank == victim:
                time.sleep(1000)  # and so keeps its connections
            if (how, victim) == plan[-1]:
                raise


def slurm(rank: int, folder: Path, port: int) -> None:
    """A rank with what srun tells it, and nothing else."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(
        SLURM_JOB_NAME="train",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NNODES="1",
        SLURM_NODEID="0",
        SLURM_NODELIST="127.0.0.1",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_JOB_ID=str(port - 15000),
    )
    train = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="moe_ep_2",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    train.fit(Module("well", 0))
    environment = type(train.strategy.cluster_environment).__name__
    print(environment, train.global_rank, dist.get_world_size(), train.global_step, os.environ["MASTER_PORT"])


def start(folder: Path, plan: list[tuple[str, int]], timeout: float = 60) -> list[BaseProcess]:
    """Two ranks."""
    return begin(run, folder, plan, timedelta(seconds=timeout))


def begin(function: Callable[..., None], folder: Path, *args: Any) -> list[BaseProcess]:
    """Call `function(rank, folder, *args)` on two ranks."""
    ranks = [CONTEXT.Process(target=_main, args=(function, rank, folder, *args), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    return ranks


def _main(function: Callable[..., None], rank: int, folder: Path, *args: Any) -> None:
    """What it prints is in a file."""
    output = os.open(folder / f"rank-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    status = 0
    try:
        function(rank, folder, *args)
    except Exception:
        sys.excepthook(*sys.exc_info())  # as at the end of a script; multiprocessing prints otherwise
        status = 1
    sys.stdout.flush()
    os._exit(status)


def ended(ranks: list[BaseProcess], folder: Path, *, within: float) -> tuple[list[str], list[int | None]]:
    """What the ranks printed, and their exit codes; None for one that did not end."""
    until = time.monotonic() + within
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return [(folder / f"rank-{number}").read_text() for number in range(len(ranks))], codes
