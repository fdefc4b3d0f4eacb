"""What `ckpt_path="last"` finds, on every rank the same, and what it warns of."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_moe_ep import MoEEPStrategy
from tests.contract import contract
from tests.parity import Case, CaseModule, trainer
from tests.pool import RankPool


class Begins(L.Callback):
    step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step = trainer.global_step


def _fit(steps: int, resume: str | None, *, sees: bool = True, **options: Any) -> int:
    """Where it began."""
    begins, saves = Begins(), ModelCheckpoint(dirpath=options.pop("dirpath", None), save_last=True)
    fitted = trainer(
        MoEEPStrategy(ep=2), max_steps=steps, enable_checkpointing=True, callbacks=[begins, saves], **options
    )
    if not sees:
        fitted._checkpoint_connector._parse_ckpt_path = lambda *args, **kwargs: None
    fitted.fit(CaseModule(Case(steps=steps)), ckpt_path=resume)
    return begins.step


def _one_rank_sees_nothing(folder: str) -> tuple[int, int]:
    _fit(2, None, dirpath=folder)
    rank = dist.get_rank()
    return _fit(3, "last", sees=rank == 0, dirpath=folder), _fit(3, "last", sees=rank == 1, dirpath=folder)


@contract("Restarts", "`ckpt_path='last'` where the ranks see different moments of the folder", "works: rank 0 decides")
def test_rank_0_decides(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_one_rank_sees_nothing, str(tmp_path), world=2) == [(2, 0)] * 2


def _in_a_new_folder(folder: str) -> tuple[list[str], str]:
    def fit() -> None:
        dist.barrier()
        _fit(1, "last", logger=CSVLogger(folder, version=f"version_{len(list(Path(folder).glob('*/*')))}"))

    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit()
        said.append(" ".join(str(warning.message) for warning in caught if "looks into" in str(warning.message)))
    with patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        try:
            fit()
        except ValueError as error:
            return said, str(error)
    return said, ""


@contract(
    "Restarts", "`ckpt_path='last'` in a folder that is new each time", "works, with a warning; refused in a restart"
)
def test_a_folder_that_is_new_each_time(ranks: RankPool, tmp_path: Path) -> None:
    ((nothing, warned), refused), (_, others) = ranks.run(_in_a_new_folder, str(tmp_path), world=2)
    assert nothing == ""
    for text, version in ((warned, 0), (refused, 1), (others, 1)):
        assert f"newest of earlier runs is {tmp_path}/lightning_logs/version_{version}/checkpoints/last.ckpt" in text
        assert 'TensorBoardLogger("runs/mine", name="", version="")' in text
