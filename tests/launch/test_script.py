"""A script that starts its ranks itself, as users run it, and signals to it: nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.processes import REPOSITORY
from tests.contract import contract

SCRIPT = """
import os, signal, sys, time
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader
from lightning_moe_ep import MoEEPStrategy, MoELayer

class Module(L.LightningModule):
    def configure_model(self):
        self.moe = MoELayer(8, num_experts=4, top_k=2, intermediate_size=8)

    def train_dataloader(self):
        return DataLoader(torch.randn(64, 8), batch_size=4)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            os.write(1, b"at the third step\\n")
            if self.global_rank == 1 and sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.global_rank == 1 and sys.argv[1] == "stuck":
                time.sleep(1000)
        return self.moe(batch).pow(2).mean()

    def on_train_end(self):
        if self.global_rank == 1 and sys.argv[1] == "end":
            raise ValueError("when the others are done")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if sys.argv[1] == "early" and os.environ.get("LOCAL_RANK") == "1":
    raise ValueError("before the fit")
L.Trainer(
    accelerator="cpu", devices=2, strategy=MoEEPStrategy(ep=2), max_epochs=-1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    max_steps=3 if sys.argv[1] == "end" else -1,
).fit(Module())
"""


@contextmanager
def script(how: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs it in a process group of its own, of which nothing may be left at the end."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    (folder / "script.py").write_text(SCRIPT)
    with (folder / "printed").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "script.py", how],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
        wait_until(lambda: not is_there(process.pid), seconds=15, folder=folder)
    finally:
        if is_there(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], *, seconds: float, folder: Path) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it does not come to that\n{printed(folder)}"
        time.sleep(0.05)


def printed(folder: Path) -> str:
    return (folder / "printed").read_text()


@pytest.mark.more
@contract(
    "Errors", "a rank that is killed under the Trainer's own launcher", "works: named with its exit code and signal"
)
def test_a_killed_rank(tmp_path: Path) -> None:
    with script("killed", tmp_path) as process:
        assert process.wait(100) == 1
    text = printed(tmp_path)
    told = "its process was killed by SIGKILL (exit code -9), perhaps by the system for want of memory"
    assert f"[rank0]: rank 1 failed first: {told}\n" in text
    assert re.search(r"\[rank0\]: rank 0 ended because rank 1 failed first: .*called from training_step", text)
    assert "Traceback" not in text


@pytest.mark.more
@contract("Errors", "an exception on one rank before its fit", "works: the others do not wait for it")
def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    with script("early", tmp_path) as process:
        assert process.wait(60) == 1
    assert "rank 0 ended because rank 1 failed first: its process ended with exit code 1" in printed(tmp_path)


@pytest.mark.more
@contract("Errors", "an exception on one rank after the others are done", "works: the exit status says so")
def test_a_rank_that_fails_at_the_end(tmp_path: Path) -> None:
    with script("end", tmp_path) as process:
        assert process.wait(60) == 1
    assert "ValueError: when the others are done" in printed(tmp_path)
    assert "[rank0]: rank 1 failed at its end: its process ended with exit code 1" in printed(tmp_path)


SIGNALS = [
    pytest.param("busy", signal.SIGINT, "all", 1, id="ctrl-c"),
    pytest.param("busy", signal.SIGTERM, "the first", 0, id="sigterm"),
    pytest.param("stuck", signal.SIGINT, "the first", 1, id="ctrl-c in a wait"),
    pytest.param("stuck", signal.SIGKILL, "the first", -9, id="killed"),
]


@pytest.mark.more
@contract("Errors", "Ctrl-C, SIGTERM, and a first process that is killed", "works: no process stays behind")
@pytest.mark.parametrize(("how", "signum", "to", "code"), SIGNALS)
def test_signals(tmp_path: Path, how: str, signum: signal.Signals, to: str, code: int) -> None:
    """SIGTERM ends with status 0, as in Lightning."""
    with script(how, tmp_path) as process:
        wait_until(lambda: printed(tmp_path).count("at the third step") == 2, seconds=60, folder=tmp_path)
        begin = time.monotonic()
        (os.killpg if to == "all" else os.kill)(process.pid, signum)
        assert process.wait(60) == code
        assert time.monotonic() - begin < 12  # the machine may do other things
    if signum == signal.SIGKILL:
        assert "rank 1 ended because rank 0 failed first: its process ended" in printed(tmp_path)
        assert re.search(r"rank 1 was in training_step \(script.py:\d+\)", printed(tmp_path))
