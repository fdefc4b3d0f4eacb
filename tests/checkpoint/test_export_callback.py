"""`HuggingFaceExport` writes at the end of a fit what the command makes of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lightning_moe_ep import HuggingFaceExport, MoEEPStrategy, export_to_hugging_face
from tests.checkpoint.exported import FamilyModule, family_model, plain_model, train_family
from tests.checkpoint.runs import Module
from tests.checkpoint.test_export import files_of, same
from tests.matrix import mostly_more
from tests.parity import trainer
from tests.pool import RankPool


def _train(family: str, folder: str, options: dict[str, Any]) -> None:
    """On a rank: a step with the callback, saved as well."""
    callback = HuggingFaceExport(f"{folder}/live", max_shard_size="100kB", **options)
    train_family(family, folder, {}, [callback])


@pytest.mark.parametrize("family", mostly_more(["qwen3_moe", "gpt_oss", "longcat_flash"], "longcat_flash"))
@pytest.mark.parametrize("world", mostly_more([2, 4], 4))
def test_as_the_command_would(ranks: RankPool, tmp_path: Path, family: str, world: int) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    options = {"dtype": "bfloat16", "tokenizer": str(tmp_path / "tokenizer")}
    ranks.run(_train, family, str(tmp_path), options, world=world)
    command = export_to_hugging_face(
        tmp_path / f"{family}.folder", tmp_path / "command", max_shard_size="100kB", **options
    )
    assert {file.name for file in (tmp_path / "live").iterdir()} == {file.name for file in command.iterdir()}
    assert same(files_of(tmp_path / "live"), files_of(command))
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        assert json.loads((tmp_path / "live" / name).read_text()) == json.loads((command / name).read_text())


def test_plain_lightning(tmp_path: Path) -> None:
    callback = HuggingFaceExport(tmp_path / "live")
    fitted = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fitted.fit(FamilyModule("mixtral"))
    fitted.save_checkpoint(tmp_path / "file")
    plain_model(tmp_path / "file", "mixtral").save_pretrained(tmp_path / "theirs")
    assert same(files_of(tmp_path / "live"), files_of(tmp_path / "theirs"))


class _Two(FamilyModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.other = nn.ModuleDict({"teacher": family_model("mixtral")})


def _told(kind: str, folder: str) -> tuple[str, bool]:
    """On a rank: how a fit ends, and whether it was trained at all."""
    options: dict[str, Any] = {}
    module: L.LightningModule = FamilyModule("mixtral")
    if kind == "own":
        module = Module("even")
    elif kind == "two":
        module = _Two("mixtral")
    elif kind == "path":
        options["model"] = "other"
    elif kind == "tokenizer":
        options["tokenizer"] = "nowhere"
    callback = HuggingFaceExport(folder, **options)
    started = []
    callback.on_train_start = lambda *_: started.append(True)  # type: ignore[method-assign]
    if kind == "disk":
        callback._check_folders = lambda: None  # type: ignore[method-assign]
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "mine").write_text("mine")
    fitted = trainer(
        MoEEPStrategy(ep=2), max_steps=1, limit_val_batches=0, enable_checkpointing=False, callbacks=[callback]
    )
    try:
        fitted.fit(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}", bool(started)
    return "no error", bool(started)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("own", "ValueError: Module has no model of transformers, which alone has a Hugging Face folder"),
        ("two", "ValueError: _Two has these models of transformers: ['model', 'other.teacher']; give the path of"),
        ("path", "ValueError: FamilyModule has these models of transformers: ['model']; give the path of the one"),
        ("tokenizer", "RuntimeError: the export to a Hugging Face folder failed on rank 0: FileNotFoundError: tok"),
        ("full", "RuntimeError: the export to a Hugging Face folder failed on rank 0: FileExistsError: "),
    ],
)
def test_what_cannot_work_is_told_before_training(ranks: RankPool, tmp_path: Path, kind: str, words: str) -> None:
    folder = tmp_path / "out"
    if kind == "full":
        folder.mkdir()
        (folder / "mine").write_text("mine")
    for told, started in ranks.run(_told, kind, str(folder), world=2):
        assert told.startswith(words)
        assert not started


def test_a_failure_at_the_end_is_told_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for told, started in ranks.run(_told, "disk", str(tmp_path / "out"), world=2):
        assert told.startswith("RuntimeError: the export to a Hugging Face folder failed on rank 0: OSError: ")
        assert started
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


class _Adapted(FamilyModule):
    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model

        super().configure_model()
        self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["q_proj"]))


def _adapted(folder: str) -> str:
    """On a rank: what is said of adapters."""
    fitted = trainer(
        MoEEPStrategy(ep=2), max_steps=1, enable_checkpointing=False, callbacks=[HuggingFaceExport(folder)]
    )
    try:
        fitted.fit(_Adapted("mixtral"))
    except ValueError as error:
        return str(error)
    return "no error"


def test_adapters_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(_adapted, str(tmp_path / "out"), world=2):
        assert "has adapters of PEFT" in told and "call save_adapter(model, folder) for the adapters" in told


def test_options_are_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype='int4' is not one of float32"):
        HuggingFaceExport(tmp_path, dtype="int4")
    with pytest.raises(ValueError, match="'' is not a size"):
        HuggingFaceExport(tmp_path, max_shard_size="")


def test_one_parameter_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_moe_ep.checkpoint import export_callback

    held = []
    steps = export_callback._Steps.__iter__

    def watched(self: Any) -> Any:
        for group, read in steps(self):
            held.append(len(self._held))
            yield group, read

    monkeypatch.setattr(export_callback._Steps, "__iter__", watched)
    test_plain_lightning(tmp_path)
    assert set(held) == {1} and len(held) > 10
    assert torch.is_grad_enabled()
