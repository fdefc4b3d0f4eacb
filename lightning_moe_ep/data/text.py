"""Text in, batches out: a data module that packs text files into blocks of equal length.

In go paths and, if not bytes, a tokenizer's folder. Out come dicts of int64 tensors `input_ids` and `labels`,
`[B, S]`. The blocks are made once and kept in a folder named by everything they depend on.
"""

import contextlib
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import lightning.pytorch as L
import torch
from datasets import (
    Dataset,
    Features,
    List,
    Value,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moe_ep.data.corpus import Document, check_paths, list_documents, list_files, split_documents
from lightning_moe_ep.data.packing import ByteCoder, Coder, HuggingFaceCoder, Packer, check_tokenizer

# Part of the cache's name; to be raised when the same arguments come to make other blocks.
_FORMAT = 1


class TextDataModule(L.LightningDataModule):
    """Text files, packed into blocks of token ids, for training and validation.

    Documents (files, or the lines of JSON Lines files) are dealt out to training and validation, tokenized,
    joined with a separator, and cut into blocks of exactly `block_size` tokens. Labels equal the inputs: the
    model shifts them.

    Args:
        paths: text files or folders of them, UTF-8. Folders are searched in full, without hidden files. In
            `.jsonl` and `.json` files each line is a document. None: the Python standard library's sources.
        text_field: the field of a JSON line that holds its text.
        tokenizer: folder with a saved Hugging Face tokenizer, whose end-of-text token goes between documents.
            None: bytes, 256 ids, with byte 0 between documents.
        block_size: tokens in a block, S.
        batch_size: blocks in a batch of one rank (of one cp group, whose ranks share it), B.
        val_fraction: share of the documents for validation.
        max_bytes: read at most this much text, training and validation together. None: all of it.
        max_val_blocks: make at most this many validation blocks. None: all of them.
        cache_dir: folder for the packed blocks; each node needs one that its processes share.
        num_workers: loader processes of each rank; 0 loads in the training process.
        seed: of the split into training and validation.

    Raises:
        FileNotFoundError: a path or the tokenizer's folder does not exist.
        ValueError: a size is out of its range, or a path holds no text.
    """

    def __init__(
        self,
        *,
        paths: list[str] | None = None,
        text_field: str = "text",
        tokenizer: str | None = None,
        block_size: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.1,
        max_bytes: int | None = None,
        max_val_blocks: int | None = None,
        cache_dir: str = "runs/data",
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if block_size < 2:
            raise ValueError(f"block_size={block_size} leaves no token to predict; use 2 or more")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} is not between 0 and 1; 0.1 keeps a tenth for validation")
        for name, value in (
            ("batch_size", batch_size),
            ("max_bytes", max_bytes),
            ("max_val_blocks", max_val_blocks),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} leaves nothing to read; use 1 or more")
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        check_paths(paths)
        self.paths = paths
        self.text_field = text_field
        self.tokenizer = tokenizer
        self.block_size = block_size
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.max_val_blocks = max_val_blocks
        self.cache_dir = cache_dir
        self.num_workers = num_workers
        self.seed = seed
        self._train: Dataset | None = None
        self._val: Dataset | None = None
        self._facts: dict[str, float] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids; known before any text is read."""
        return self._coder.vocab_size

    @property
    def val_bytes_per_token(self) -> float:
        """Bytes of validation text in one token, to turn a loss per token into bits per byte.

        A separator counts as one byte, so the number is exactly 1 for bytes.
        """
        self._require_setup()
        return self._facts["val_bytes_per_token"]

    @property
    def train_dataset(self) -> Dataset:
        """Training blocks, one column `input_ids`."""
        self._require_setup()
        return self._train

    @property
    def val_dataset(self) -> Dataset:
        """Validation blocks, one column `input_ids`."""
        self._require_setup()
        return self._val

    @override
    def prepare_data(self) -> None:
        """Make the blocks, if the cache has none that fit. Lightning calls this in one process of each node.

        Raises:
            ValueError: a JSON line has no text, or there is less text than one block or two documents.
        """
        files = list_files(self.paths)
        folder = self._folder(files)
        if folder.exists():
            return
        train, val = self._packers(list_documents(files))
        # Written aside and renamed when complete, so that a run that is interrupted leaves no half data set.
        aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        aside.mkdir(parents=True)
        try:
            _write(val, aside / "val")  # the smaller one first: it is the one that may turn out too small
            _write(train, aside / "train")
            facts = {"val_bytes_per_token": val.num_bytes / val.num_tokens}
            (aside / "facts.json").write_text(json.dumps(facts) + "\n")
            aside.rename(folder)
        except OSError:
            # Another node that shares the folder may have been first; its blocks are the same.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    @override
    def setup(self, stage: str | None = None) -> None:
        """Map the blocks into memory. Lightning calls this in every process.

        Args:
            stage: what Lightning is about to do; the blocks are the same for all of it.

        Raises:
            FileNotFoundError: `prepare_data` has not run on this node.
        """
        folder = self._folder(list_files(self.paths))
        if not folder.exists():
            raise FileNotFoundError(
                f"no packed text in {str(folder)!r}: prepare_data() has not run on this node with this "
                "text and these settings, or the text has changed since; call it first, and give the "
                "processes of a node one cache_dir"
            )
        self._train = load_from_disk(str(folder / "train")).with_format("torch")
        self._val = load_from_disk(str(folder / "val")).with_format("torch")
        self._facts = json.loads((folder / "facts.json").read_text())

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled training batches; the last incomplete one of an epoch is dropped."""
        sampler = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        replicas = 1 if sampler is None else sampler["num_replicas"]
        blocks = len(self.train_dataset)
        if blocks < replicas * self.batch_size:
            raise ValueError(
                f"{blocks} training blocks do not fill one batch of batch_size={self.batch_size} on each of "
                f"{replicas} ranks (or cp groups of ranks); give more text (paths, max_bytes), or lower batch_size or "
                f"block_size={self.block_size}"
            )
        return self._loader(self.train_dataset, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Validation batches, in order."""
        return self._loader(self.val_dataset, shuffle=False)

    @override
    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation batches: there is no third part of the text."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation batches."""
        return self.val_dataloader()

    @cached_property
    def _coder(self) -> Coder:
        return ByteCoder() if self.tokenizer is None else HuggingFaceCoder(self.tokenizer)

    def _loader(self, dataset: Dataset, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=_collate,
        )

    def _folder(self, files: Sequence[Path]) -> Path:
        """Where the blocks of these files lie, or will lie."""
        tokenizer = [] if self.tokenizer is None else sorted(Path(self.tokenizer).resolve().iterdir())
        depends_on = {
            "format": _FORMAT,
            "files": _stamps(files),
            "tokenizer": _stamps(tokenizer),
            "text_field": self.text_field,
            "block_size": self.block_size,
            "val_fraction": self.val_fraction,
            "max_bytes": self.max_bytes,
            "max_val_blocks": self.max_val_blocks,
            "seed": self.seed,
        }
        digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
        return Path(self.cache_dir) / digest[:16]

    def _packers(self, documents: Sequence[Document]) -> tuple[Packer, Packer]:
        """What makes the training and the validation blocks."""
        train, val = split_documents(documents, val_fraction=self.val_fraction, seed=self.seed)
        train_bytes = val_bytes = None
        if self.max_bytes is not None:
            val_bytes = max(1, round(self.max_bytes * self.val_fraction))
            train_bytes = max(1, self.max_bytes - val_bytes)

        packer = partial(Packer, coder=self._coder, block_size=self.block_size, text_field=self.text_field)
        return (
            packer(name="training", documents=train, max_bytes=train_bytes),
            packer(name="validation", documents=val, max_bytes=val_bytes, max_blocks=self.max_val_blocks),
        )

    def _require_setup(self) -> None:
        if self._train is None:
            raise RuntimeError("the blocks are not loaded; call prepare_data() and setup() first, as Trainer.fit does")


def _write(packer: Packer, folder: Path) -> None:
    # Beside the data set, or `datasets` would keep a second copy in the home folder.
    scratch = folder.with_name(f"{folder.name}.scratch")
    row = Features({"input_ids": List(Value(packer.coder.dtype.name), length=packer.block_size)})
    with _no_progress_bars():
        try:
            blocks = Dataset.from_generator(packer.blocks, features=row, cache_dir=str(scratch))
        except DatasetGenerationError as error:
            # `datasets` hides what was wrong with a document behind its own error.
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        blocks.save_to_disk(str(folder))
    shutil.rmtree(scratch)


def _collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    input_ids = torch.stack([row["input_ids"] for row in rows]).to(torch.int64)  # [B, S]
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _stamps(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of each file, which tell without reading it that it is the same."""
    stats = [(str(file), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """The bars of `datasets` off, and as they were again afterwards; it has only a global switch."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
