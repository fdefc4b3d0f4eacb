"""The `lightning-moe-ep` command: LightningCLI for any LightningModule and LightningDataModule.

`fit`, `validate`, `test` and `predict` are LightningCLI's own, others are in `commands`. After `fit` it
says what was reached, beside what a bigram model of the same data reaches, and what to type next.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from lightning_moe_ep.cli.commands import COMMANDS
from lightning_moe_ep.data import TextDataModule, bigram_loss

BIGRAM_VOCABULARY = 4096
"""The largest vocabulary for which the bigram baseline is computed: its table grows with the square."""


class SaveFitConfig(SaveConfigCallback):
    """Keeps a fit's configuration in the run's folder; a run that fails to start, or an evaluation, replaces none."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Too early: the run may fail yet."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")


class MoEParser(LightningArgumentParser):
    """Shows the commands that are not LightningCLI's among its own."""

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        action = super().add_subcommands(*args, **kwargs)
        for name, (description, _) in COMMANDS.items():
            action.add_subcommand(name, ArgumentParser(), help=description)
        return action


class MoECLI(LightningCLI):
    """LightningCLI that closes a fit with a summary."""

    @override
    def after_fit(self) -> None:
        log_dir = self.trainer.log_dir  # a broadcast: every rank must ask
        if self.trainer.is_global_zero:
            sys.stderr.flush()
            print("\n".join(summary(self.trainer, self.datamodule, log_dir=log_dir)), flush=True)


def summary(trainer: L.Trainer, datamodule: L.LightningDataModule | None, *, log_dir: str | None) -> list[str]:
    """What a fit reached and what to type next, in lines; the last is `val_loss=...` if there was a validation."""
    lines = [""]
    saved = trainer.checkpoint_callback
    checkpoint = (getattr(saved, "last_model_path", "") or saved.best_model_path) if saved else ""
    if isinstance(datamodule, TextDataModule) and datamodule.vocab_size <= BIGRAM_VOCABULARY:
        baseline = bigram_loss(datamodule.train_dataset, datamodule.val_dataset, datamodule.vocab_size)
        lines.append(f"A bigram model of the same data: {baseline / datamodule.val_bytes_per_token:.3f} nats per byte")
    if checkpoint:
        lines.append(f"Checkpoint: {checkpoint}")
    commands = []
    if checkpoint and log_dir:
        # The saved configuration, because what was given on the command line is in it.
        command = f"{_typed()} {{}} --config {shlex.quote(str(Path(log_dir) / 'config.yaml'))} --ckpt_path"
        more = (
            f"--trainer.max_steps {2 * trainer.global_step}"
            if trainer.max_steps != -1
            else f"--trainer.max_epochs {2 * trainer.current_epoch}"
        )
        commands.append(f"  {command.format('validate')} {shlex.quote(checkpoint)}")
        commands.append(f"  {command.format('fit')} last {more}")
    if log_dir and any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        commands.append(f"  {_typed('tensorboard', 'tensorboard.main')} --logdir {shlex.quote(log_dir)}")
    if commands:
        lines += ["Next:", *commands]
    if (loss := trainer.callback_metrics.get("val_loss")) is not None:
        bytes_per_token = datamodule.val_bytes_per_token if isinstance(datamodule, TextDataModule) else 1.0
        lines.append(f"val_loss={float(loss) / bytes_per_token:.3f}")
    return lines


def _typed(name: str = "lightning-moe-ep", module: str = "lightning_moe_ep") -> str:
    """What to type for a command of this environment, which may not be the active one."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m {module}"
    program = program.with_name(name)
    if (found := shutil.which(program.name)) and Path(found).samefile(program):
        return program.name
    return shlex.quote(os.path.relpath(program))


def main(args: list[str] | None = None) -> None:
    """Run the command; `args` in place of `sys.argv` for tests."""
    typed = sys.argv[1:] if args is None else args
    if typed and typed[0] in COMMANDS:
        sys.exit(COMMANDS[typed[0]][1](typed[1:]))
    MoECLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        parser_class=MoEParser,
        # PL_FIT__TRAINER__MAX_STEPS=100 in place of --trainer.max_steps 100.
        parser_kwargs={"default_env": True},
        save_config_callback=SaveFitConfig,
        # A run that goes on in the same folder writes its config there again.
        save_config_kwargs={"overwrite": True},
        args=args,
    )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
