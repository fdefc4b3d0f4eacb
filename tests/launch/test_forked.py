"""Several ranks in a notebook: forked, whatever ran there before; everything that the user holds is as after a run."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.launch import forked
from lightning_moe_ep.launch.forked import ForkLauncher
from tests.cli.processes import run_python
from tests.contract import contract

# IPython sets it, and Lightning takes a process for interactive in which it is set.
NOTEBOOK = "import runpy, sys; sys.ps1 = 'In : '; runpy.run_module('tests.launch.cells', run_name='__main__')"


def run_cells(folder: Path, *cells: str) -> None:
    (printed,) = run_python(["-c", NOTEBOOK, *cells], cwd=folder, timeout=300)
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
def test_cells(tmp_path: Path) -> None:
    run_cells(
        tmp_path, "one_device", "two_ranks", "the_same_trainer_again", "built_in_init", "a_sharded_module_is_refused"
    )


@pytest.mark.more
@contract(
    "Notebooks",
    "an error, a killed rank or an interrupted cell",
    "ends all ranks within seconds; the error is the rank's own, with its traceback; the module keeps the weights from"
    " before, and a warning says so",
)
@contract(
    "Notebooks",
    "weights of more than 4 GiB, or a `configure_model` that only works on the ranks",
    "a checkpoint instead of the module's weights; refused: the module without it",
)
def test_more_cells(tmp_path: Path) -> None:
    run_cells(tmp_path, "one_device", "failures", "weights_that_stay_away", "names_and_meta", "loggers")


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
