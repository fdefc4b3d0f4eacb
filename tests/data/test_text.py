"""Text files to batches: what is in the blocks, what the cache remembers, and what each refusal says."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lightning.pytorch as L
import pytest
import torch
from jsonargparse import ArgumentParser
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast

from lightning_moe_ep.data import TextDataModule, packing
from lightning_moe_ep.data.corpus import list_documents, list_files, split_documents

Make = Callable[..., TextDataModule]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten files, each of 40 bytes of its own letter, some of them in a folder below."""
    root = tmp_path / "text"
    (root / "below").mkdir(parents=True)
    for i in range(10):
        (root / ("below" if i % 2 else "") / f"{i}.txt").write_text(chr(97 + i) * 40)
    return root


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Make:
    def build(**options: Any) -> TextDataModule:
        defaults = {"paths": [str(folder)], "cache_dir": str(tmp_path / "cache"), "block_size": 16}
        return TextDataModule(**{**defaults, "batch_size": 2, "val_fraction": 0.3, **options})

    return build


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """Two letters a token where it knows the pair, and one otherwise."""
    letters = [chr(97 + i) for i in range(26)]
    vocab = {token: i for i, token in enumerate(["<end>", "<?>", *letters, "aa", "bb", "cc", "dd"])}
    merges = [(c, c) for c in "abcd"]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<?>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", unk_token="<?>").save_pretrained(folder)
    return str(folder)


def _ready(data: TextDataModule) -> TextDataModule:
    data.prepare_data()
    data.setup()
    return data


def _streams(data: TextDataModule) -> tuple[list[int], list[int]]:
    return (
        data.train_dataset["input_ids"][:].flatten().tolist(),
        data.val_dataset["input_ids"][:].flatten().tolist(),
    )


def test_blocks_are_the_joined_documents(make: Make, folder: Path) -> None:
    data = _ready(make())
    train_part, val_part = split_documents(list_documents(list_files([str(folder)])), val_fraction=0.3, seed=0)
    assert (len(train_part), len(val_part)) == (7, 3)
    for stream, part in zip(_streams(data), (train_part, val_part), strict=True):
        joined = b"".join(document.path.read_bytes() + b"\0" for document in part)
        assert bytes(stream) == joined[: len(joined) // 16 * 16]
    assert data.vocab_size == 256
    assert data.val_bytes_per_token == 1.0


def test_batches_are_int64_and_labels_equal_the_inputs(make: Make) -> None:
    data = _ready(make())
    train, val = data.train_dataloader(), data.val_dataloader()
    assert len(data.train_dataset) == 17
    assert len(train) == 8
    assert len(val) == 4
    batch = next(iter(train))
    assert set(batch) == {"input_ids", "labels"}
    assert all(t.shape == (2, 16) and t.dtype == torch.int64 for t in batch.values())
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
    assert isinstance(val.sampler, SequentialSampler)
    assert not isinstance(train.sampler, SequentialSampler)


def test_each_file_is_in_one_part_only(make: Make) -> None:
    train, val = map(set, _streams(_ready(make())))
    assert train & val == {0}
    assert train | val == {0, *range(97, 107)}


def test_the_split_follows_the_seed_and_not_where_the_text_lies(make: Make, folder: Path) -> None:
    first = _streams(_ready(make(seed=1)))
    moved = folder.rename(folder.with_name("moved"))
    assert _streams(_ready(make(seed=1, paths=[str(moved)]))) == first
    assert _streams(_ready(make(seed=2, paths=[str(moved)]))) != first


def test_a_file_named_twice_counts_once(make: Make, folder: Path) -> None:
    assert _streams(_ready(make(paths=[str(folder), str(folder / "0.txt")]))) == _streams(_ready(make()))


def test_hidden_and_binary_files_are_no_text(make: Make, folder: Path) -> None:
    expected = _streams(_ready(make()))
    (folder / "image").write_bytes(b"\x89PNG\0\0")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    assert _streams(_ready(make())) == expected


def test_bytes_that_are_not_utf8(make: Make, folder: Path, tokenizer: str) -> None:
    for file in folder.rglob("*.txt"):
        file.write_bytes(b"\xff" * 40)
    assert set(_streams(_ready(make()))[0]) == {0, 255}
    _ready(make(tokenizer=tokenizer, block_size=2))


def test_json_lines_are_documents(make: Make, folder: Path) -> None:
    file = folder / "lines.jsonl"
    texts = ["é" * 10, "b" * 30, "c\n" * 10, "d" * 25]
    file.write_text("\n\n".join(json.dumps({"body": text, "id": 1}) for text in texts))
    data = _ready(make(paths=[str(file)], text_field="body", block_size=2, val_fraction=0.25))
    train, val = map(bytes, _streams(data))
    found = [text for part in (train, val) for text in part.decode("utf-8", "ignore").split("\0") if text]
    # The last byte of a part is dropped where it is odd.
    assert sorted(text.rstrip("\n") for text in found) == sorted(text.rstrip("\n") for text in texts)
    assert val.count(b"\0") <= 1


def test_max_bytes_and_max_val_blocks_bound_what_is_made(make: Make) -> None:
    train, val = _streams(_ready(make(max_bytes=100)))
    assert len(train) == 64  # 70 bytes and 2 separators
    assert len(val) == 16  # 30 bytes and 1 separator
    data = _ready(make(max_val_blocks=2))
    assert len(data.val_dataset) == 2
    assert len(data.train_dataset) == 17


def test_a_tokenizer_makes_other_tokens(make: Make, tokenizer: str) -> None:
    data = make(tokenizer=tokenizer, block_size=8)
    assert data.vocab_size == 32  # before any text is read
    _ready(data)
    stream = _streams(data)[1]
    assert max(stream) < 32
    assert 0 in stream
    pairs = {28, 29, 30, 31} & set(stream)
    letters = set(stream) - pairs - {0}
    tokens = 20 * len(pairs) + 40 * len(letters) + 3
    assert data.val_bytes_per_token == pytest.approx(3 * 41 / tokens)


def test_the_second_call_does_nothing_until_something_changes(
    make: Make, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().prepare_data()
    (kept,) = (tmp_path / "cache").iterdir()
    assert sorted(p.name for p in kept.iterdir()) == ["facts.json", "train", "val"]
    with monkeypatch.context() as patched:
        patched.setattr(packing.Packer, "blocks", None)
        make().prepare_data()
        make(batch_size=3, num_workers=1).prepare_data()
    os.utime(folder / "0.txt", ns=(1, 1))
    make().prepare_data()
    make(block_size=8).prepare_data()
    make(seed=1).prepare_data()
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_an_interrupted_run_leaves_nothing(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make().prepare_data()
    assert list((tmp_path / "cache").iterdir()) == []
    _ready(make())


def test_two_nodes_that_share_the_cache_may_both_write(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def other_first(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        make().prepare_data()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", other_first)
    make().prepare_data()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    make().setup()


def test_progress_bars_are_as_they_were(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    before = datasets.are_progress_bars_disabled()
    make().prepare_data()
    assert datasets.are_progress_bars_disabled() == before
    assert "examples" not in capfd.readouterr().err


def test_works_under_a_trainer_and_in_another_process(make: Make, tmp_path: Path) -> None:
    data = make(num_workers=1)
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path, max_epochs=1
    )
    seen: list[torch.Size] = []

    class _Module(L.LightningModule):
        def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            seen.append(batch["input_ids"].shape)

    trainer.test(_Module(), data, verbose=False)
    assert seen[0] == (2, 16)
    assert _streams(_ready(pickle.loads(pickle.dumps(make())))) == _streams(data)


def test_the_standard_library_is_there_without_a_path(make: Make) -> None:
    names = {file.name for file in list_files(None)}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not [file for file in list_files(None) if {"site-packages", "test"} & set(file.parts)]
    data = _ready(make(paths=None, max_bytes=50_000, block_size=64))
    assert b"import" in bytes(_streams(data)[0])


def test_every_argument_has_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(TextDataModule, "data")
    parser.print_help()
    told = " ".join(capsys.readouterr().out.split())
    for sentence in (
        "text files or folders of them",
        "share of the documents for validation",
        "of the split",
    ):
        assert sentence in told
    assert parser.parse_args(["--data.block_size", "32"]).data.block_size == 32


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"block_size": 1}, ValueError, "block_size=1 leaves no token to predict; use 2 or more"),
        ({"val_fraction": 0.0}, ValueError, r"val_fraction=0.0 is not between 0 and 1"),
        ({"val_fraction": 1.0}, ValueError, r"val_fraction=1.0 is not between 0 and 1"),
        ({"batch_size": 0}, ValueError, "batch_size=0 leaves nothing to read"),
        ({"max_bytes": 0}, ValueError, "max_bytes=0 leaves nothing to read"),
        ({"paths": []}, ValueError, "paths is empty"),
        (
            {"paths": ["nowhere"]},
            FileNotFoundError,
            r"paths: 'nowhere' does not exist \(looked in .*name text",
        ),
        (
            {"tokenizer": "nowhere"},
            FileNotFoundError,
            "tokenizer='nowhere' is not a folder .*save_pretrained",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    make: Make, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(**options)


def test_folders_without_what_they_should_hold_are_refused_at_once(make: Make, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "binary").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match=r"there is no text in '.*bare' \(hidden, empty and binary"):
        make(paths=[str(tmp_path / "bare")])
    with pytest.raises(FileNotFoundError, match=r"bare' has neither tokenizer.json nor tokenizer_config.json"):
        make(tokenizer=str(tmp_path / "bare"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"body": "x"}',
            r"lines.jsonl:3 has no text in the field 'text', but the fields \['body'\]; set text_f",
        ),
        ('{"text": 7}', r"lines.jsonl:3 has no text in the field 'text'"),
        ("[1]", r"lines.jsonl:3 has no text in the field 'text', but a list"),
        ('{"text": ', r"lines.jsonl:3 is not JSON \(.*one JSON object a line"),
    ],
)
def test_a_json_line_without_text_is_named(make: Make, tmp_path: Path, line: str, words: str) -> None:
    good = json.dumps({"text": "x" * 50})
    (tmp_path / "lines.jsonl").write_text("\n".join([good, good, line, good]))
    with pytest.raises(ValueError, match=words):
        make(paths=[str(tmp_path / "lines.jsonl")]).prepare_data()
    assert list((tmp_path / "cache").iterdir()) == []


def test_too_little_text_is_refused(make: Make, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"validation text has 123 tokens .* less than one block of block_size=200"):
        make(block_size=200).prepare_data()
    with pytest.raises(ValueError, match=r"has 1 document \(.*0.txt\), and training and validation need one each"):
        make(paths=[str(folder / "0.txt")]).prepare_data()
    with pytest.raises(ValueError, match=r"17 training blocks do not fill one batch of batch_size=18 on each of 1"):
        _ready(make(batch_size=18)).train_dataloader()


def test_blocks_are_asked_for_only_when_they_are_there(make: Make) -> None:
    with pytest.raises(FileNotFoundError, match=r"prepare_data\(\) has not run on this node"):
        make().setup()
    for name in ("train_dataset", "val_dataset", "val_bytes_per_token"):
        with pytest.raises(RuntimeError, match=r"call prepare_data\(\) and setup\(\) first"):
            getattr(make(), name)
