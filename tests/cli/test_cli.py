"""The command from start to end, as a newcomer runs it: the quickstart on less data."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep import MoEEPStrategy, convert_to_file
from lightning_moe_ep.cli.main import _typed, main, summary
from tests.cli.processes import QUICKSTART, run_python
from tests.contract import contract

LESS = shlex.split(
    "--trainer.max_steps 4 --trainer.val_check_interval 2 --trainer.limit_val_batches 2 --trainer.log_every_n_steps 1"
    " --data.max_bytes 200000 --model.config.hidden_size 32 --model.config.moe_intermediate_size 32"
)


@dataclass
class Ran:
    """What a fit printed, where it was started and where it was told to write; tests may go on from what is there."""

    printed: str
    cwd: Path
    output: Path
    weights: dict[str, torch.Tensor]
    """At its end."""

    def next_command(self, name: str) -> list[str]:
        """The printed `python -m lightning_moe_ep NAME ...` as arguments for Python."""
        section = self.printed[self.printed.index("\nNext:\n") :]
        (line,) = re.findall(rf"^  \S+ -m lightning_moe_ep ({name} .*)$", section, flags=re.MULTILINE)
        return ["-m", "lightning_moe_ep", *shlex.split(line)]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    file = run / "last.pt"
    convert_to_file(str(run / "checkpoints" / "last.ckpt"), str(file))
    weights: dict[str, torch.Tensor] = torch.load(file)["state_dict"]
    file.unlink()
    return weights


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("quickstart")
    cwd, output = folder / "cwd", folder / "output"
    cwd.mkdir()
    where = [
        f"--trainer.default_root_dir={output}",
        f"--trainer.logger.save_dir={output}",
        f"--data.cache_dir={output / 'data'}",
    ]
    arguments = ["-m", "lightning_moe_ep", "fit", "--config", str(QUICKSTART), *LESS, *where]
    (printed,) = run_python(arguments, cwd=cwd)
    return Ran(printed, cwd, output, weights_of(output))


def last_line(printed: str) -> str:
    return printed.rstrip("\n").rsplit("\n", 1)[-1]


def loss_of(printed: str) -> float:
    found = re.fullmatch(r"val_loss=(\d+\.\d{3})", last_line(printed))
    assert found, printed
    return float(found[1])


@contract("Launch", "a script or command that starts its own ranks")
def test_a_fit_closes_with_its_loss_once(fit: Ran) -> None:
    assert 4 < loss_of(fit.printed) < 5.6  # guessing is log 256 = 5.545
    assert len(re.findall(r"^val_loss=", fit.printed, flags=re.MULTILINE)) == 1
    (baseline,) = re.findall(r"^A bigram model of the same data: (\d\.\d{3}) nats per byte$", fit.printed, re.MULTILINE)
    assert 2 < float(baseline) < 5


def test_everything_is_under_the_folders_that_were_given(fit: Ran) -> None:
    assert list(fit.cwd.iterdir()) == []
    names = {path.name.split(".")[0] for path in fit.output.iterdir()}
    assert names == {"checkpoints", "config", "data", "events", "hparams"}
    assert f"Checkpoint: {fit.output}/checkpoints/last.ckpt" in fit.printed
    assert f"-m tensorboard.main --logdir {fit.output}" in fit.printed


def test_the_curves_are_there(fit: Ran) -> None:
    (events,) = fit.output.glob("events.*")
    curves = EventAccumulator(str(events)).Reload()
    steps = {tag: [point.step for point in curves.Scalars(tag)] for tag in curves.Tags()["scalars"]}
    for tag in ("train_loss", "grad_norm", "grad_norm/dense", "grad_norm/experts"):
        assert steps[tag] == [0, 1, 2, 3]
    assert steps["val_loss"] == [1, 3]
    rates = [point.value for point in curves.Scalars("lr-AdamW/experts")]
    assert rates == pytest.approx([0.003 * step / 20 for step in (1, 2, 3, 4)])


@pytest.mark.more
def test_the_next_commands_are_real(fit: Ran) -> None:
    (printed,) = run_python(fit.next_command("validate"), cwd=fit.cwd)
    (loss,) = re.findall(r"val_loss\s*│\s*([0-9.]+)", printed)
    assert float(loss) == pytest.approx(loss_of(fit.printed), abs=6e-4)

    arguments = fit.next_command("fit")
    assert arguments[-2:] == ["--trainer.max_steps", "8"]
    (printed,) = run_python(arguments, cwd=fit.cwd)
    assert f"Restored all states from the checkpoint at {fit.output}/checkpoints/last.ckpt" in printed
    assert loss_of(printed) < loss_of(fit.printed)
    newest = max(fit.output.glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
    assert [point.step for point in EventAccumulator(str(newest)).Reload().Scalars("train_loss")] == [4, 5, 6, 7]
    assert list(fit.cwd.iterdir()) == []


@pytest.mark.more
def test_a_pretrained_model_and_text_of_ones_own_on_one_device(tmp_path: Path) -> None:
    """Twice in one folder, and with the short forms of the README."""
    config = yaml.safe_load(QUICKSTART.read_text())["model"]["init_args"]["config"]
    torch.manual_seed(3)
    small = AutoConfig.for_model(**{**config, "hidden_size": 32, "moe_intermediate_size": 32})
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "model")
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / f"{i}.txt").write_text("what is learnt by heart " * 200)
    arguments = [
        *("-m", "lightning_moe_ep", "fit", "--config", str(QUICKSTART)),
        *("--model.config", "null", "--model.pretrained", "model", f"--data.paths=[{tmp_path / 'text'}]"),
        *("--trainer.devices", "1", "--trainer.strategy.ep", "1", "--trainer.max_steps", "2"),
        *("--trainer.val_check_interval", "1", "--trainer.limit_val_batches", "1"),
    ]
    for _ in range(2):
        (printed,) = run_python(arguments, cwd=tmp_path)
        assert loss_of(printed) < 5.6
    saved = yaml.safe_load((tmp_path / "runs" / "quickstart" / "config.yaml").read_text())
    assert saved["model"]["init_args"]["pretrained"] == "model"
    assert saved["data"]["init_args"]["paths"] == [str(tmp_path / "text")]


def _printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    return captured.out


@contract("Launch", "the command with YAML, overrides, `--print_config` and `--help`")
def test_the_printed_config_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _printed(["fit", "--config", str(QUICKSTART), "--trainer.max_steps", "7", "--print_config"], capsys)
    (tmp_path / "c.yaml").write_text(first)
    assert _printed(["fit", "--config", str(tmp_path / "c.yaml"), "--print_config"], capsys) == first
    printed, given = yaml.safe_load(first), yaml.safe_load(QUICKSTART.read_text())
    assert printed["trainer"]["max_steps"] == 7
    assert printed["trainer"]["strategy"]["init_args"]["ep"] == 2
    assert printed["model"]["init_args"]["config"] == given["model"]["init_args"]["config"]


@contract("Launch", "the strategy on the command line", "works: by alias, short class name, or class path")
def test_names_of_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    def parsed(*arguments: str) -> Any:
        return yaml.safe_load(_printed(["fit", "--config", str(QUICKSTART), *arguments, "--print_config"], capsys))

    assert parsed("--trainer.strategy", "moe_ep_2")["trainer"]["strategy"] == "moe_ep_2"
    for name in ("MoEEPStrategy", "lightning_moe_ep.MoEEPStrategy"):
        strategy = parsed("--trainer.strategy", name, "--trainer.strategy.replicate", "2")["trainer"]["strategy"]
        assert strategy["class_path"] == "lightning_moe_ep.MoEEPStrategy"
        assert strategy["init_args"]["replicate"] == 2
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(QUICKSTART), "--trainer.strategy.epp", "2"])
    assert end.value.code == 2 and "'epp' is not accepted" in capsys.readouterr().err


@contract("Launch", "`PL_FIT__TRAINER__MAX_STEPS=7` and the like", "works; what is on the command line wins")
def test_environment_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__CONFIG", str(QUICKSTART))
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_STEPS", "7")
    monkeypatch.setenv("PL_FIT__SEED_EVERYTHING", "8")
    given = yaml.safe_load(_printed(["fit", "--seed_everything", "9", "--print_config"], capsys))
    assert (given["trainer"]["max_steps"], given["seed_everything"]) == (7, 9)
    assert given["trainer"]["strategy"]["init_args"]["ep"] == 2


class Data(L.LightningDataModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()


class Model(L.LightningModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.width = width


class OwnCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.width", "model.width")


@contract("Launch", "a LightningCLI of your own", "works, with `link_arguments`, overrides and `--print_config`")
def test_a_cli_of_ones_own() -> None:
    for strategy in (
        ["--trainer.strategy", "MoEEPStrategy", "--trainer.strategy.ep", "2"],
        ['--trainer.strategy={"class_path": "lightning_moe_ep.MoEEPStrategy", "init_args": {"ep": 2}}'],
        ["--trainer.strategy", "moe_ep_2"],
    ):
        arguments = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", *strategy, "--data.width", "6"]
        cli = OwnCLI(Model, Data, run=False, save_config_callback=None, args=arguments)
        assert isinstance(cli.trainer.strategy, MoEEPStrategy) and cli.trainer.strategy.ep == 2
        assert cli.model.width == 6


KILL = """
import os, signal
from pathlib import Path
import lightning.pytorch as L

class Kill(L.Callback):
    def on_train_start(self, trainer, pl_module):
        os.write(1, f"STARTS AT {trainer.global_step}\\n".encode())  # at once: ranks print into one file

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3 and trainer.global_rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@contract("Launch", "`torchrun` on one node")
@contract("Restarts", "`torchrun --max-restarts` and `--ckpt_path last`", "works: goes on from the newest checkpoint")
@pytest.mark.more
def test_a_killed_rank_under_torchrun(fit: Ran, tmp_path: Path) -> None:
    """Killed inside of an epoch, one step after a save; what comes out is what an undisturbed run has."""
    (tmp_path / "killing.py").write_text(KILL)
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = ["-m", "lightning_moe_ep", "fit", "--config", str(QUICKSTART), *LESS]
    more = ["--trainer.callbacks+", "killing.Kill", "--ckpt_path", "last"]
    (printed,) = run_python([*agent, *command, *more], cwd=tmp_path, timeout=200)
    assert re.findall(r"STARTS AT (\d+)", printed) == ["0", "0", "2", "2"]
    # What rank 0 says of it depends on how soon the agent ends it.
    assert printed.count("there is no last checkpoint available") >= 1  # at the very first start
    assert loss_of(printed) == loss_of(fit.printed)
    restarted = weights_of(tmp_path / "runs" / "quickstart")
    assert all(torch.equal(restarted[name], weight) for name, weight in fit.weights.items())


def test_curves_that_are_not_written_are_not_told_of(tmp_path: Path) -> None:
    told = []
    for logger in (False, CSVLogger(tmp_path), TensorBoardLogger(tmp_path)):
        trainer = L.Trainer(accelerator="cpu", logger=logger, enable_checkpointing=False, default_root_dir=tmp_path)
        told.append(summary(trainer, None, log_dir=str(tmp_path)))
    assert told[:2] == [[""], [""]] and told[2][1] == "Next:" and "tensorboard" in told[2][2]


def test_help(tmp_path: Path) -> None:
    (printed,) = run_python(["-m", "lightning_moe_ep", "--help"], cwd=tmp_path)
    for command in ("fit", "validate", "test", "predict"):
        assert re.search(rf"^ +{command} ", printed, flags=re.MULTILINE)


def test_what_to_type_is_found_where_the_environment_is_not_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / ".venv" / "bin" / "lightning-moe-ep"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert _typed() == ".venv/bin/lightning-moe-ep"
    assert _typed("tensorboard", "tensorboard.main") == ".venv/bin/tensorboard"
    monkeypatch.setenv("PATH", str(script.parent))
    assert _typed() == "lightning-moe-ep"
