"""`lightning-moe-ep plan`: what is read from arguments and configuration, what is refused, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moe_ep import CausalLMModule
from lightning_moe_ep.cli import plan as command
from lightning_moe_ep.cli.main import main
from lightning_moe_ep.planning.machine import machine_of
from lightning_moe_ep.tools.plan.config import configured, read_run
from tests.cli.processes import QUICKSTART

CONFIG = ("--config", QUICKSTART)


@dataclass
class StandIn:
    """In place of a plan, which takes long: what it was asked, and whether the run fits."""

    asked: dict[str, Any]
    yours: Any = None
    best: Any = None
    impossible: str | None = None

    def text(self, *, everything: bool) -> str:
        return "everything" if everything else "the best"

    def as_dict(self) -> dict[str, Any]:
        return {"world": self.asked["world"]}

    def picture(self, file: str) -> None:
        Path(file).write_text("a picture")


@dataclass
class Fits:
    too_large: str | None = None


Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    def run(*arguments: object, **found: Any) -> tuple[int, str, str]:
        def plan(build: Any, **asked: Any) -> StandIn:
            run.asked = asked  # type: ignore[attr-defined]
            return StandIn(asked, **found)

        monkeypatch.setattr(command, "plan", plan)
        with pytest.raises(SystemExit) as end:
            main(["plan", *map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, printed.out, printed.err

    return run


def test_what_is_asked(typed: Typed, tmp_path: Path) -> None:
    assert typed(*CONFIG, "--world", 64, best=Fits())[:2] == (0, "the best\n")
    asked = typed.asked  # type: ignore[attr-defined]
    assert (asked["world"], asked["devices_per_node"], asked["sequences"], asked["length"]) == (64, 8, 8, 256)
    assert (asked["precision"], asked["device_type"], asked["strategy"]["ep"]) == ("32-true", "cpu", 2)
    assert asked["machine"] == machine_of(None, "32-true")

    gpu = ("--gpu", "h100", "--memory-gib", "70", "--latency-us=5", "--trainer.precision", "bf16-mixed")
    status, printed, _ = typed(*CONFIG, "--world=8", *gpu, "--gpus-per-node", 4, "--json", best=Fits())
    assert status == 0 and json.loads(printed) == {"world": 8}
    asked = typed.asked  # type: ignore[attr-defined]
    machine, h100 = asked["machine"], machine_of("h100", "bf16-mixed")
    assert (machine.memory, machine.flops, machine.latency) == (70 * 2**30, h100.flops, pytest.approx(5e-6))
    assert asked["devices_per_node"] == 4 and asked["precision"] == "bf16-mixed"

    figures = ("--tflops", 100, "--intra-gbps", 200, "--inter-gbps", 20, "--picture", tmp_path / "a.png", "--all")
    assert typed(*CONFIG, "--world", 8, *figures, best=Fits())[1] == "everything\n"
    machine = typed.asked["machine"]  # type: ignore[attr-defined]
    assert (machine.flops, machine.intra, machine.inter, machine.memory) == (1e14, 2e11, 2e10, None)
    assert typed.asked["cp"] is None  # type: ignore[attr-defined]
    assert typed(*CONFIG, "--cp", 1, 4, "--world", 8, best=Fits())[0] == 0
    assert typed.asked["cp"] == [1, 4]  # type: ignore[attr-defined]
    assert (tmp_path / "a.png").exists()


def test_the_environment_is_read_as_by_fit(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_FIT__CONFIG", str(QUICKSTART))
    monkeypatch.setenv("PL_FIT__TRAINER__PRECISION", "bf16-true")
    status, _, told = typed("--world", 8, best=Fits())
    asked = typed.asked  # type: ignore[attr-defined]
    assert (status, asked["length"], asked["precision"]) == (0, 256, "bf16-true")
    assert "args parameter" not in told


def test_exit_status(typed: Typed) -> None:
    world = (*CONFIG, "--world", 8)
    assert typed(*world, best=Fits(), yours=Fits())[0] == 0
    assert typed(*world, best=Fits(), yours=Fits("too large"))[0] == 1
    assert typed(*world)[0] == 1
    assert typed(*world, best=Fits(), impossible="ep=2 does not divide")[0] == 1
    assert typed(*CONFIG)[0] == 2 and typed(*world, "--modl", "x")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "batch"),
    [
        (["--tokens", "1024"], (4, 256)),
        (["--tokens", "1000"], (1, 1000)),
        (["--tokens", "1024", "--length", "512"], (2, 512)),
        (["--length", "512"], (8, 512)),
        (["--data.batch_size", "3"], (3, 256)),
    ],
)
def test_tokens_of_a_rank(typed: Typed, arguments: list[str], batch: tuple[int, int]) -> None:
    assert typed(*CONFIG, "--world", 8, *arguments, best=Fits())[0] == 0
    assert (typed.asked["sequences"], typed.asked["length"]) == batch  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1000", "--length", "512"], "--tokens 1000 are no whole number of sequences of --length 512"),
        (["--trainer.precision", "16-mixed"], "precision='16-mixed' is not supported"),
        (["--memory-gib", "-1"], "--memory-gib is -1.0, but must be positive and finite"),
        (["--tflops", "inf"], "--tflops is inf, but must be positive and finite"),
        (["--picture", "no/such/folder/a.png"], "there is no folder no/such/folder for the picture a.png"),
        (["--gpu", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_what_is_refused(typed: Typed, arguments: list[str], words: str) -> None:
    status, printed, told = typed(*CONFIG, "--world", 8, *arguments)
    assert (status, printed) == (2, "") and words in told


def test_data_that_does_not_say_its_tokens(typed: Typed, tmp_path: Path) -> None:
    model = "model: {class_path: lightning_moe_ep.CausalLMModule, init_args: {config: {model_type: qwen3_moe}}}\n"
    data = "data: {class_path: lightning.pytorch.demos.boring_classes.BoringDataModule}\n"
    (tmp_path / "run.yaml").write_text(model + data)
    status, _, told = typed("--config", tmp_path / "run.yaml", "--world", 8)
    assert status == 2 and "give --tokens, and --length for more than one sequence" in told


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("moe_ep", {"ep": "auto"}),
        ("moe_ep_4", {"ep": 4}),
        ("auto", None),
        ("{class_path: lightning_moe_ep.MoEEPStrategy, init_args: {ep: 2, replicate: 2}}", {"ep": 2, "replicate": 2}),
        ("{class_path: lightning.pytorch.strategies.ModelParallelStrategy}", None),
    ],
)
def test_how_a_strategy_is_written(strategy: str, arguments: dict[str, Any] | None, tmp_path: Path) -> None:
    run = read_run([*map(str, CONFIG), "--trainer.strategy", strategy])
    if arguments is None:
        assert run.strategy is None
    else:
        assert run.strategy is not None and arguments.items() <= run.strategy.items()


class ForReal(CausalLMModule):
    """Reads its weights as transformers does."""

    def configure_model(self) -> None:
        raise RuntimeError("You are using `from_pretrained` with a meta device context manager")


def test_models_are_built_without_memory(tmp_path: Path) -> None:
    module = read_run([*map(str, CONFIG)]).build()
    assert module._trainer is None and all(p.device == torch.device("meta") for p in module.parameters())
    with pytest.raises(ValueError, match=r"ForReal.configure_model cannot build .* give build_pretrained\(folder\)"):
        configured(ForReal(config={"model_type": "qwen3_moe"}))


def test_help(typed: Typed) -> None:
    status, printed, _ = typed("--help")
    assert status == 0 and printed.startswith("usage: lightning-moe-ep plan ") and "--gpus-per-node" in printed
