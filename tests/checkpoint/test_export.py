"""What `export_to_hugging_face` writes is what transformers alone loads, with the weights that were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_moe_ep import export_to_hugging_face
from tests.checkpoint.exported import FORMS, ask_stock, family_batch, plain_model, train_families, train_family
from tests.pool import RankPool

FAMILIES = [
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",  # stacked on disk, with biases
    "olmoe",
    "qwen3_vl_moe",  # stacked on disk and transposed
    "longcat_flash",  # its rows for zero experts are apart in memory
    "jamba",
]


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each family's checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(train_families, FAMILIES, str(folder), world=2, timeout=120)
    return folder


def files_of(folder: Path) -> dict[str, Tensor]:
    """All weights on disk."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs
    )


def test_transformers_alone_loads_what_was_trained(trained: Path, tmp_path: Path) -> None:
    # From either form, one with next to no memory and in many files: all is converted an expert at a time.
    small: dict[str, Any] = {"max_memory": "10kB", "max_shard_size": "100kB"}
    for family in FAMILIES:
        export_to_hugging_face(trained / f"{family}.folder", tmp_path / family, **small)
        export_to_hugging_face(trained / f"{family}.file", tmp_path / f"{family} of a file")
        assert len(list((tmp_path / family).glob("*.safetensors"))) > 2
        assert same(files_of(tmp_path / family), files_of(tmp_path / f"{family} of a file"))
    answers = ask_stock(tmp_path, {family: (tmp_path / family, family_batch(family)) for family in FAMILIES})
    for family, answer in answers.items():
        right = plain_model(trained / f"{family}.file", family)
        assert answer["told"] == {}, family
        assert same(answer["state"], dict(right.state_dict())), family
        with torch.no_grad():
            assert torch.equal(answer["logits"], right(**family_batch(family)).logits), family


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_is_what_transformers_would_write(trained: Path, tmp_path: Path, family: str) -> None:
    plain_model(trained / f"{family}.file", family).save_pretrained(tmp_path / "theirs")
    export_to_hugging_face(trained / f"{family}.folder", tmp_path / "ours")
    assert same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))
    assert {file.name for file in (tmp_path / "ours").iterdir()} == {
        file.name for file in (tmp_path / "theirs").iterdir()
    }
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "theirs" / name).exists():
            assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
                (tmp_path / "theirs" / name).read_text()
            )


def test_tied_weights_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train_family, "qwen3_moe", str(tmp_path), {"tie_word_embeddings": True}, world=2)
    for form in FORMS:
        export_to_hugging_face(tmp_path / f"qwen3_moe.{form}", tmp_path / form)
        assert "lm_head.weight" not in files_of(tmp_path / form)
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(told.values())
    state = loaded.state_dict()
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    trained = torch.load(tmp_path / "qwen3_moe.file", weights_only=True)["state_dict"]
    assert torch.equal(state["lm_head.weight"], trained["model.lm_head.weight"])


def test_another_dtype(trained: Path, tmp_path: Path) -> None:
    export_to_hugging_face(trained / "deepseek_v3.folder", tmp_path / "as it was")
    export_to_hugging_face(trained / "deepseek_v3.folder", tmp_path / "ours", dtype="bfloat16")
    before, after = files_of(tmp_path / "as it was"), files_of(tmp_path / "ours")
    # What the family has in fp32 whatever is asked for.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "as it was", dtype=torch.bfloat16).state_dict()
    kept = {name for name in after if after[name].dtype == torch.float32}
    assert kept == {name for name in after if loaded.get(name, after[name][:0].bfloat16()).dtype == torch.float32}
    assert kept == {f"model.layers.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")}
    assert all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in before)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_tokenizer_comes_along(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    of_tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "preprocessor_config.json"}
    for name in (*of_tokenizer, "model.safetensors", "README", "training_args.json"):
        (tmp_path / "tokenizer" / name).write_text("{}")
    ranks.run(train_family, "mixtral", str(tmp_path), {"pretrained": str(tmp_path / "tokenizer")}, world=2)
    of_model = {"model.safetensors", "config.json", "generation_config.json"}
    export_to_hugging_face(tmp_path / "mixtral.folder", tmp_path / "known")
    assert {file.name for file in (tmp_path / "known").iterdir()} == of_tokenizer | of_model
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    export_to_hugging_face(tmp_path / "mixtral.folder", tmp_path / "gone")
    assert {file.name for file in (tmp_path / "gone").iterdir()} == of_model
    export_to_hugging_face(tmp_path / "mixtral.folder", tmp_path / "given", tokenizer=tmp_path / "moved")
    assert {file.name for file in (tmp_path / "given").iterdir()} == of_tokenizer | of_model


def test_a_configuration_that_is_given(trained: Path, tmp_path: Path) -> None:
    """For a checkpoint without a record: of another strategy, or one that an older version wrote."""
    export_to_hugging_face(trained / "longcat_flash.folder", tmp_path / "known")
    for form in FORMS:
        source = tmp_path / f"without.{form}"
        if form == "folder":
            source.mkdir()
            for file in (trained / "longcat_flash.folder").iterdir():
                (source / file.name).write_bytes(file.read_bytes())
        meta = source / "meta.pt" if form == "folder" else source
        held = torch.load(
            trained / "longcat_flash.folder" / "meta.pt" if form == "folder" else trained / "longcat_flash.file"
        )
        del held["moe_ep"]
        torch.save(held, meta)
        with pytest.raises(ValueError, match=r"does not say which model of transformers it has.*config\.json"):
            export_to_hugging_face(source, tmp_path / "no")
        export_to_hugging_face(source, tmp_path / form, config=tmp_path / "known" / "config.json")
        assert same(files_of(tmp_path / form), files_of(tmp_path / "known"))


def _change(source: Path, target: Path, **changes: Any) -> Path:
    held = torch.load(source, weights_only=True)
    for name, value in changes.items():
        if name == "drop":
            del held["state_dict"][value]
        elif name == "weights":
            held["state_dict"].update(value)
        else:
            held["moe_ep"]["models"][name] = value
    torch.save(held, target)
    return target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drop": "model.lm_head.weight"}, "lm_head.weight is missing"),
        ({"weights": {"model.extra": torch.ones(2)}}, "extra is not the model's"),
        ({"weights": {"model.lm_head.weight": torch.ones(2)}}, r"lm_head.weight is \[2\], the model's is \[96, 64\]"),
        ({"weights": {"model.x.lora_A.default.weight": torch.ones(2)}}, "has adapters of PEFT .*save_adapter"),
        ({"other": {"class": "MixtralModel", "config": {}}}, r"several models; .*\['model', 'other'\]"),
        ({"model": {"class": "OwnModel", "config": {"model_type": "mixtral"}}}, "no class OwnModel.*save_pretrained"),
    ],
)
def test_what_does_not_fit_is_refused(trained: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    source = _change(trained / "mixtral.file", tmp_path / "c.ckpt", **changes)
    with pytest.raises(ValueError, match=words):
        export_to_hugging_face(source, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["c.ckpt"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "int8"}, ValueError, "dtype='int8' is not one of float32"),
        ({"max_memory": "lots"}, ValueError, "'lots' is not a size; write it as 4GiB"),
        ({"max_shard_size": "0"}, ValueError, "'0' is not a size"),
        ({"tokenizer": "nowhere"}, FileNotFoundError, "tokenizer='nowhere' is not a folder"),
        ({"model": "other"}, ValueError, r"no model at 'other'; it has \['model'\]"),
    ],
)
def test_options_that_are_refused(
    trained: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        export_to_hugging_face(trained / "mixtral.file", tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="is there already"):
        export_to_hugging_face(trained / "mixtral.file", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    export_to_hugging_face(trained / "mixtral.file", tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"mine", "empty"}


def test_too_little_space(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("", (), {"free": 2**18}))
    with pytest.raises(OSError, match=r"has 0\.2 MiB free, but 0\.7 MiB are needed"):
        export_to_hugging_face(trained / "mixtral.file", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
