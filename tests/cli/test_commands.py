"""`lightning-moe-ep export` and `inspect`: what they print, and how they end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from lightning_moe_ep.cli.main import main
from tests.checkpoint.exported import family_model
from tests.checkpoint.runs import EP2, Run
from tests.checkpoint.runs import run as train
from tests.checkpoint.test_disk_form import checkpoint_of
from tests.cli.processes import run_python
from tests.pool import RankPool


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c.ckpt"
    checkpoint_of(family_model("qwen3_moe"), path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit status, and what a command prints to either stream."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, printed.out, printed.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = run(capsys, "--help")
    for command in ("export", "inspect", "verify"):
        assert re.search(rf"^ +{command} ", printed, flags=re.MULTILINE)
        status, out, _ = run(capsys, command, "--help")
        assert status == 0 and out.startswith(f"usage: lightning-moe-ep {command} ")
    assert "--max_shard_size" in run(capsys, "export", "--help")[1]


def test_export_and_inspect_as_typed(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (printed,) = run_python(
        ["-m", "lightning_moe_ep", "export", str(file), "out", "--dtype", "bfloat16", "--max-shard-size", "200kB"],
        cwd=tmp_path,
    )
    assert printed.splitlines()[-1] == "Written: out"
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    _, printed, _ = run(capsys, "inspect", tmp_path / "out")
    assert "bfloat16)" in printed and printed.splitlines()[-1] == "Nothing wrong was found."


def test_one_file_and_back(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(train, Run(EP2, "folder", max_steps=1, save=str(tmp_path / "a.ckpt"), weights_only=True), world=2)
    assert run(capsys, "export", tmp_path / "a.ckpt", tmp_path / "b.ckpt", "--to", "file")[0] == 0
    assert run(capsys, "export", tmp_path / "b.ckpt", tmp_path / "c.ckpt", "--to=folder", "--max-memory=1MiB")[0] == 0
    assert (tmp_path / "b.ckpt").is_file() and (tmp_path / "c.ckpt" / ".metadata").is_file()
    status, out, _ = run(capsys, "inspect", tmp_path / "c.ckpt", "--json")
    assert (status, json.loads(out)["optimizers"], json.loads(out)["step"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "out"], "error: the checkpoint nowhere does not exist"),
        (["{file}", "{file}"], "is there already; give another place"),
        (["{file}", "{out}", "--to", "file"], "is one file already"),
        (["{file}", "{out}", "--to", "folder", "--dtype", "float32"], "--dtype is for Hugging Face folders; leave it"),
        (["{file}", "{out}", "--to", "folder", "--max-shard-size", "3GB"], "--max_shard_size is for Hugging Face fol"),
        (["{file}", "{out}", "--max-memory", "much"], "'much' is not a size; write it as 4GiB, 500MB or a number"),
    ],
)
def test_errors_of_export(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    given = [argument.format(file=file, out=tmp_path / "out") for argument in arguments]
    status, out, told = run(capsys, "export", *given)
    assert (status, out) == (1, "") and words in told
    assert list(tmp_path.iterdir()) == []


def test_exit_status_of_inspect(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "inspect", file, "--json")
    assert status == 0 and json.loads(out)["findings"] == []
    held = torch.load(file, weights_only=True)
    held["state_dict"]["model.lm_head.weight"][0, 0] = float("nan")
    torch.save(held, tmp_path / "nan.ckpt")
    status, out, _ = run(capsys, "inspect", tmp_path / "nan.ckpt")
    assert status == 1 and out.splitlines()[-1] == "WRONG: model.lm_head.weight has 1 NaN or Inf"
    status, out, _ = run(capsys, "inspect", tmp_path / "nan.ckpt", "--json")
    assert status == 1 and json.loads(out)["findings"] == ["model.lm_head.weight has 1 NaN or Inf"]
    for path in (tmp_path, tmp_path / "nowhere"):
        status, out, told = run(capsys, "inspect", path)
        assert (status, out) == (2, "") and told.startswith("error: ")
