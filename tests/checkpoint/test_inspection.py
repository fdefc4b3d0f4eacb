"""What `inspect_path` says of each form, and each of its findings, made to happen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_moe_ep import convert_to_folder, export_to_hugging_face
from lightning_moe_ep.checkpoint.inspection import inspect_path
from lightning_moe_ep.checkpoint.stored import NotACheckpointError
from tests.checkpoint.exported import train_families
from tests.checkpoint.runs import MIXED, Run, on
from tests.pool import RankPool


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families in all three forms, and a module of one's own in two."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(train_families, ["qwen3_moe", "gpt_oss"], str(folder), world=2)
    for family in ("qwen3_moe", "gpt_oss"):
        export_to_hugging_face(folder / f"{family}.file", folder / f"{family}.huggingface", max_shard_size="200kB")
    for form in ("folder", "file"):
        on(ranks, Run(MIXED, form, "a list of experts", max_steps=2, save=str(folder / f"own.{form}")))
    return folder


@pytest.mark.parametrize("form", ["folder", "file", "huggingface"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_of_transformers(trained: Path, family: str, form: str) -> None:
    path = trained / f"{family}.{form}"
    found = inspect_path(path)
    prefix = "" if form == "huggingface" else "model."
    assert (found.findings, found.missing) == ([], [])
    assert found.experts == {f"{prefix}model.layers.{layer}.mlp.experts": 8 for layer in range(2)}
    weights = torch.load(trained / f"{family}.file", weights_only=True)["state_dict"]
    assert found.parameters == sum(value.numel() for value in weights.values())
    assert found.dtypes == {"float32": found.parameters}
    assert found.size == sum(f.stat().st_size for f in (path.iterdir() if path.is_dir() else [path]))
    assert found.layout == (None if form == "huggingface" else {"replicate": 1, "efsdp": 1, "ep": 2, "cp": 1})
    assert (found.step, found.optimizers) == ((None, 0) if form == "huggingface" else (1, 1))
    text = found.text()
    assert f"{found.parameters:,} float32" in text and "8 in each of 2 layers" in text
    assert text.endswith("Nothing wrong was found.")
    assert ("saved at    replicate 1, efsdp 1, ep 2, cp 1, step 1" in text) == (form != "huggingface")
    assert json.loads(json.dumps(found.as_dict()))["parameters"] == found.parameters


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_list_of_experts_of_ones_own(trained: Path, form: str) -> None:
    found = inspect_path(trained / f"own.{form}")
    assert found.findings == [] and found.step == 2
    assert found.experts == {f"model.blocks.{block}.moe.experts": 6 for block in range(2)}


Change = Callable[[dict[str, Any]], None]


def _equal_experts(held: dict[str, Any]) -> None:
    for name, value in held["state_dict"].items():
        if "blocks.1.moe.experts.4." in name:
            value.copy_(held["state_dict"][name.replace("experts.4.", "experts.2.")])


def _nan(held: dict[str, Any]) -> None:
    held["state_dict"]["model.head.weight"][3, :2] = torch.tensor([float("nan"), float("inf")])


def _nan_moment(held: dict[str, Any]) -> None:
    held["optimizer_states"][0]["state"][0]["exp_avg"][0] = float("nan")


def _zero_moments(held: dict[str, Any]) -> None:
    for state in held["optimizer_states"][0]["state"].values():
        state["exp_avg_sq"].zero_()


def _other_count(held: dict[str, Any]) -> None:
    held["moe_ep"]["experts"]["model.blocks.0.moe.experts"] = 7


FINDINGS: dict[str, tuple[Change, str]] = {
    "equal": (_equal_experts, "the experts 2 and 4 of model.blocks.1.moe.experts are equal"),
    "nan": (_nan, "model.head.weight has 2 NaN or Inf"),
    "nan moment": (_nan_moment, "optimizer 0: exp_avg of "),
    "zero moments": (_zero_moments, "optimizer 0: exp_avg_sq is zero everywhere after 2 steps"),
}


@pytest.mark.parametrize("form", ["folder", "file"])
@pytest.mark.parametrize("finding", FINDINGS)
def test_findings_in_a_checkpoint(trained: Path, tmp_path: Path, finding: str, form: str) -> None:
    change, words = FINDINGS[finding]
    held = torch.load(trained / "own.file", weights_only=True)
    change(held)
    torch.save(held, tmp_path / "file")
    if form == "folder":
        convert_to_folder(tmp_path / "file", tmp_path / "folder")
    (found,) = inspect_path(tmp_path / form).findings
    assert found.startswith(words)
    assert f"WRONG: {found}" in inspect_path(tmp_path / form).text()


def test_moments_of_a_layers_experts(trained: Path, tmp_path: Path) -> None:
    held = torch.load(trained / "own.file", weights_only=True)
    (groups,) = held["moe_ep"]["optimizers"]
    names = [name for group in groups for name in group]
    convert_to_folder(trained / "own.file", tmp_path / "right")
    assert inspect_path(tmp_path / "right").findings == []
    numbers = {id(p): n for n, p in enumerate(names)}
    assert len(numbers) == len(names)
    shapes = {tuple(held["state_dict"][f"model.blocks.0.moe.experts.{e}.w1.weight"].shape) for e in range(6)}
    for state in held["optimizer_states"][0]["state"].values():
        if tuple(state["exp_avg"].shape) in shapes:
            state["exp_avg"].zero_()
    torch.save(held, tmp_path / "file")
    convert_to_folder(tmp_path / "file", tmp_path / "folder")
    findings = inspect_path(tmp_path / "folder").findings
    words = "optimizer 0: exp_avg of model.blocks.0.moe.experts.w1.weight, of all experts, is zero after 2 steps"
    assert words in findings


def test_before_the_first_step_moments_may_be_zero(trained: Path, tmp_path: Path) -> None:
    held = torch.load(trained / "own.file", weights_only=True)
    _zero_moments(held)
    held["global_step"] = 0
    torch.save(held, tmp_path / "file")
    assert inspect_path(tmp_path / "file").findings == []


def test_another_number_of_experts(trained: Path, tmp_path: Path) -> None:
    held = torch.load(trained / "qwen3_moe.file", weights_only=True)
    config = held["moe_ep"]["models"]["model"]["config"]
    config.update(_with_experts(config, 16))
    torch.save(held, tmp_path / "file")
    findings = inspect_path(tmp_path / "file").findings
    assert findings[0] == "model.model.layers.0.mlp.experts has 8 experts; the configuration says [16]"
    assert len(findings) == 2

    held = torch.load(trained / "own.file", weights_only=True)
    _other_count(held)
    torch.save(held, tmp_path / "file")
    (found,) = inspect_path(tmp_path / "file").findings
    assert found == "model.blocks.0.moe.experts has 6 experts; 7 were saved"

    held = torch.load(trained / "own.file", weights_only=True)
    held["state_dict"] = {n: v for n, v in held["state_dict"].items() if "blocks.1.moe.experts.3." not in n}
    torch.save(held, tmp_path / "file")
    report = inspect_path(tmp_path / "file")
    assert report.findings == ["model.blocks.1.moe.experts has 5 experts up to 5, but not 3"]
    assert report.missing == ["model.blocks.1.moe.experts.3"]


def test_an_interrupted_save(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "own.folder", tmp_path / "c.ckpt")
    (tmp_path / ".c.ckpt.saving").mkdir()
    (found,) = inspect_path(tmp_path / "c.ckpt").findings
    assert found == f"a save was interrupted: {tmp_path}/.c.ckpt.saving is incomplete and can be removed"
    shutil.rmtree(tmp_path / "c.ckpt")
    with pytest.raises(FileNotFoundError, match=r"does not exist; .*\.c\.ckpt\.saving is what an interrupted save has"):
        inspect_path(tmp_path / "c.ckpt")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "__1_0.distcp").unlink(), "is not complete: __1_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").unlink(), "is not complete: .metadata is missing"),
        (lambda folder: (folder / "meta.pt").unlink(), "is not complete: meta.pt is missing"),
    ],
)
def test_an_incomplete_folder(trained: Path, tmp_path: Path, break_it: Callable[[Path], None], words: str) -> None:
    shutil.copytree(trained / "own.folder", tmp_path / "c.ckpt")
    break_it(tmp_path / "c.ckpt")
    assert words in inspect_path(tmp_path / "c.ckpt").findings[-1]


def test_a_folder_that_is_not_what_was_saved(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c.ckpt"
    convert_to_folder(trained / "own.file", folder)
    with (folder / "meta.pt").open("ab") as file:
        file.write(b"more")
    (found,) = inspect_path(folder).findings
    size = (folder / "meta.pt").stat().st_size
    assert f"is incomplete: meta.pt has {size:,} bytes instead of {size - 4:,}" in found
    (folder / "complete.json").rename(folder / "kept")
    (folder / "complete.json").write_text("[]")
    assert inspect_path(folder).findings[0].startswith("complete.json is damaged: TypeError(")
    (folder / "kept").rename(folder / "complete.json")
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing" in inspect_path(folder).findings[0]
    assert inspect_path(folder).missing == ["__0_0.distcp"]


def test_damage_that_sizes_do_not_show(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c.ckpt"
    convert_to_folder(trained / "own.file", folder)
    (folder / "complete.json").unlink()
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata.replace(b"ChunkStorageMetadata", b"ChunkStorageMetadatq"))
    assert ".metadata is damaged: AttributeError" in inspect_path(folder).findings[0]
    (folder / ".metadata").write_bytes(metadata)
    shard = folder / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert "__0_0.distcp is damaged at byte" in inspect_path(folder).findings[0]
    folder.rename(folder.with_name(".c.ckpt.saving"))
    (found,) = inspect_path(folder.with_name(".c.ckpt.saving")).findings
    assert "it is what an interrupted save has left" in found


def test_what_the_loader_would_refuse(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "qwen3_moe.huggingface", tmp_path / "folder")
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = inspect_path(folder).findings
    assert any("mlp.experts.gate_up_proj cannot be made of" in each for each in found)


def test_a_file_that_is_cut_off(trained: Path, tmp_path: Path) -> None:
    data = (trained / "own.file").read_bytes()
    (tmp_path / "c.ckpt").write_bytes(data[: len(data) // 2])
    assert "is cut off or damaged" in inspect_path(tmp_path / "c.ckpt").findings[0]


def _break_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"metadata": ')
    return "model.safetensors.index.json is damaged: JSONDecodeError("


def _shard(folder: Path) -> Path:
    return next(folder.glob("model-00002-of-*"))


def _truncate(folder: Path) -> str:
    data = _shard(folder).read_bytes()
    _shard(folder).write_bytes(data[:-100])
    return f"{_shard(folder).name} is cut off or damaged"


def _remove(folder: Path) -> str:
    name = _shard(folder).name
    _shard(folder).unlink()
    return f"{name}, which the index names, is missing"


def _lose(folder: Path) -> str:
    tensors = load_file(_shard(folder))
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, _shard(folder))
    return f"{name}, which the index names, is not in {_shard(folder).name}"


def _set_nan(folder: Path) -> str:
    tensors = load_file(_shard(folder))
    name = sorted(tensors)[0]
    tensors[name][0] = float("nan")
    save_file(tensors, _shard(folder))
    return f"{name} has {tensors[name][0].numel()} NaN or Inf"


def _make_equal(folder: Path) -> str:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, value in tensors.items():
            if "layers.1.mlp.experts." in name:
                value[...] = 0.5 if name.split(".")[5] in ("2", "7") else value
        save_file(tensors, file)
    return "the experts 2 and 7 of model.layers.1.mlp.experts are equal"


def _with_experts(config: dict[str, Any], number: int) -> dict[str, Any]:
    """With another number by whichever name this transformers has for it."""
    names = [name for name in config if name in ("num_experts", "num_local_experts")]
    assert names
    return {**config, **dict.fromkeys(names, number)}


def _change_config(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(_with_experts(config, 4)))
    return "model.layers.0.mlp.experts has 8 experts; the configuration says [4]"


def _no_weights(folder: Path) -> str:
    for file in folder.glob("model*"):
        file.unlink()
    return "there are no weights: neither model.safetensors nor an index of several files"


@pytest.mark.parametrize(
    "change", [_truncate, _remove, _break_index, _lose, _set_nan, _make_equal, _change_config, _no_weights]
)
def test_findings_in_a_hugging_face_folder(trained: Path, tmp_path: Path, change: Callable[[Path], str]) -> None:
    shutil.copytree(trained / "qwen3_moe.huggingface", tmp_path / "hf")
    words = change(tmp_path / "hf")
    report = inspect_path(tmp_path / "hf")
    assert any(finding.startswith(words) for finding in report.findings), report.findings


def test_a_hugging_face_folder_without_a_configuration(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "gpt_oss.huggingface", tmp_path / "hf")
    (tmp_path / "hf" / "config.json").unlink()
    assert inspect_path(tmp_path / "hf").missing == ["config.json"]


def test_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no")
    for path in (tmp_path, tmp_path / "text"):
        with pytest.raises(NotACheckpointError):
            inspect_path(path)
    with pytest.raises(FileNotFoundError):
        inspect_path(tmp_path / "nowhere")
