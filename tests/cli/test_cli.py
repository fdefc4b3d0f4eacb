"""The command from start to end, as a newcomer runs it: the quickstart on less data."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_moe_ep.cli.main import _typed, main
from tests.cli.processes import QUICKSTART, run_python

LESS = shlex.split(
    "--trainer.max_steps 4 --trainer.val_check_interval 2 --trainer.limit_val_batches 2 --trainer.log_every_n_steps 1"
    " --data.max_bytes 200000 --model.config.hidden_size 32 --model.config.moe_intermediate_size 32"
)


@dataclass
class Ran:
    """What a fit printed, where it was started and where it was told to write."""

    printed: str
    cwd: Path
    output: Path

    def next_command(self, name: str) -> list[str]:
        """The printed `python -m lightning_moe_ep NAME ...` as arguments for Python."""
        section = self.printed[self.printed.index("\nNext:\n") :]
        (line,) = re.findall(rf"^  \S+ -m lightning_moe_ep ({name} .*)$", section, flags=re.MULTILINE)
        return ["-m", "lightning_moe_ep", *shlex.split(line)]


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
    return Ran(printed, cwd, output)


def last_line(printed: str) -> str:
    return printed.rstrip("\n").rsplit("\n", 1)[-1]


def loss_of(printed: str) -> float:
    found = re.fullmatch(r"val_loss=(\d+\.\d{3})", last_line(printed))
    assert found, printed
    return float(found[1])


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
    rates = [point.value for point in curves.Scalars("lr-AdamW/pg1")]
    assert rates == pytest.approx([0.003 * step / 20 for step in (1, 2, 3, 4)])


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


def test_the_printed_config_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = _printed(["fit", "--config", str(QUICKSTART), "--trainer.max_steps", "7", "--print_config"], capsys)
    (tmp_path / "c.yaml").write_text(first)
    assert _printed(["fit", "--config", str(tmp_path / "c.yaml"), "--print_config"], capsys) == first
    printed, given = yaml.safe_load(first), yaml.safe_load(QUICKSTART.read_text())
    assert printed["trainer"]["max_steps"] == 7
    assert printed["trainer"]["strategy"]["init_args"]["ep"] == 2
    assert printed["model"]["init_args"]["config"] == given["model"]["init_args"]["config"]


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
