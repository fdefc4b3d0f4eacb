"""Several ranks in a notebook: forked, whatever ran there before; everything that the user holds is as after a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as L
import psutil
import pytest
import torch
from jupyter_client.manager import start_new_kernel

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.launch import forked
from lightning_moe_ep.launch.forked import ForkLauncher
from tests.cli.processes import REPOSITORY, run_python
from tests.contract import contract

# IPython sets it, and Lightning takes a process for interactive in which it is set.
NOTEBOOK = """
import os, runpy, sys
sys.ps1 = 'In : '
os.environ['OMP_WAIT_POLICY'] = 'passive'  # the two threads there, on a busy machine
runpy.run_module('tests.launch.cells', run_name='__main__')
"""


def run_cells(folder: Path, *cells: str, start: Sequence[str] = ("-c", NOTEBOOK)) -> None:
    (printed,) = run_python([*start, *cells], cwd=folder, timeout=300)
    for cell in cells:
        assert f"ran {cell} in" in printed, printed


@contract("Notebooks", "`devices=1`: fit, validate, test, predict", "works, in the notebook's process")
@contract(
    "Notebooks",
    "`devices` more than 1",
    "works, also after a run on one device: ranks are forked for each call and end with it; the module (plain), the"
    " metrics, `global_step`, callbacks and loggers are then as after a run in the notebook's process",
)
@contract("Notebooks", "`fit` again, `validate`, `test` and `predict` after it, `ckpt_path=` of any run", "works")
@contract(
    "Notebooks", "`predict` on several ranks", "works with a BasePredictionWriter; refused: return_predictions=True"
)
@contract(
    "Notebooks",
    "`Trainer.save_checkpoint` after a run on several ranks",
    "saves the weights; the optimizers' state only ModelCheckpoint can save, during the fit",
)
@contract("Notebooks", "a module after `devices=1`, then `devices=2`", "refused: make a new one, with ckpt_path")
@contract("Seeds", "`seed_everything`, two runs of one command", "bit-equal losses on CPU ranks")
@contract(
    "Seeds",
    "`seed_everything(workers=True)`",
    "works: each worker of each rank draws numbers of its own, the same in each run",
)
@contract(
    "Notebooks",
    "an error, a killed rank or an interrupted cell",
    "ends all ranks within seconds; the error is the rank's own, with its traceback; the module keeps the weights from"
    " before, and a warning says so",
)
@pytest.mark.more
def test_cells(tmp_path: Path) -> None:
    run_cells(
        tmp_path,
        "one_device",
        "two_ranks",
        "the_same_trainer_again",
        "built_in_init",
        "a_sharded_module_is_refused",
        "failures",
        "seeds",
        "seeds",
    )
    check_seeds(tmp_path, runs=2)


def check_seeds(folder: Path, *, runs: int) -> None:
    """All runs have drawn and computed the same, on each rank something else."""
    of_ranks = []
    for rank in range(2):
        found = [torch.load(folder / f"{number}-run-of-{rank}") for number in range(runs)]
        assert found == [found[0]] * runs
        of_ranks.append(found[0])
    (losses, drawn), (other_losses, other_drawn) = of_ranks
    assert len(losses) == 2 * 48 // 8 and not set(losses) & set(other_losses)
    numbers = [number for sample in drawn + other_drawn for number in sample]
    assert len(set(numbers)) == len(numbers) == 2 * 48 * 3


TRAINS_ON = """
import time
from tests.launch.cells import *

class TrainsOn(BuiltBefore):
    def training_step(self, batch, batch_idx):
        Path(f"started-{self.global_rank}").touch()
        return super().training_step(batch, batch_idx)

trainer(2, max_epochs=100_000).fit(TrainsOn(), loader())
"""


@pytest.mark.more
@contract("Notebooks", "interrupting a cell in Jupyter, or killing its kernel", "leaves no process behind")
def test_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    kernel, client = start_new_kernel(cwd=str(tmp_path))
    process = psutil.Process(kernel.provisioner.pid)
    try:
        client.execute(TRAINS_ON)
        ranks = _ranks_of(process, tmp_path)
        kernel.interrupt_kernel()
        assert client.get_shell_msg(timeout=60)["content"]["ename"] == "SystemExit"
        assert not any(rank.is_running() for rank in ranks)
        client.execute(TRAINS_ON)
        ranks = _ranks_of(process, tmp_path)
    finally:
        process.kill()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    client.stop_channels()


def _ranks_of(kernel: psutil.Process, folder: Path) -> list[psutil.Process]:
    """Both, once they train."""
    started = [folder / f"started-{rank}" for rank in range(2)]
    end = time.monotonic() + 120
    while not all(file.exists() for file in started):
        assert time.monotonic() < end
        time.sleep(0.1)
    for file in started:
        file.unlink()
    ranks = kernel.children()
    assert len(ranks) == 2
    return ranks


@pytest.mark.more
@contract(
    "Notebooks",
    "weights of more than 4 GiB, or a `configure_model` that only works on the ranks",
    "a checkpoint instead of the module's weights; refused: the module without it",
)
def test_more_cells(tmp_path: Path) -> None:
    run_cells(tmp_path, "one_device", "weights_that_stay_away", "names_and_meta", "loggers")


@pytest.mark.more
@contract("Notebooks", "the same code as a script", "bit-equal losses")
def test_a_script_draws_and_computes_the_same(tmp_path: Path) -> None:
    run_cells(tmp_path, "seeds")
    run_cells(tmp_path, "seeds", start=("-m", "tests.launch.cells"))
    check_seeds(tmp_path, runs=2)


def _trainer(**options: int) -> L.Trainer:
    return L.Trainer(accelerator="cpu", devices=2, strategy=MoEEPStrategy(), logger=False, **options)


@contract("Notebooks", "`num_nodes` more than 1", "refused: run a script")
@contract(
    "Notebooks", "several GPUs after CUDA was used in the notebook", "refused: restart the kernel, or run a script"
)
def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(_trainer().strategy.launcher, ForkLauncher)
    monkeypatch.setattr(forked, "_IS_INTERACTIVE", True)
    trainer = _trainer()
    assert isinstance(trainer.strategy.launcher, ForkLauncher)
    with pytest.raises(ValueError, match="num_nodes=2 in an interactive process"):
        _trainer(num_nodes=2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="Restart the kernel"):
        trainer.fit(L.LightningModule())
