"""Documents in, blocks of token ids out: a coder turns text into ids, the packer joins and cuts them.

Every block is full. What is left at the end of the last document is dropped.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from lightning_moe_ep.data.corpus import Document, read_document


class Coder(Protocol):
    """Text to token ids."""

    vocab_size: int
    """Ids are in `[0, vocab_size)`."""
    dtype: np.dtype[np.integer]
    """The smallest that holds them all."""
    separator: int | None
    """The id that ends a document, if there is one."""

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """The ids of a document without its separator, `[T]`."""


class ByteCoder:
    """Text as its bytes."""

    def __init__(self) -> None:
        self.vocab_size = 256
        self.dtype: np.dtype[np.integer] = np.dtype(np.uint8)
        self.separator: int | None = 0

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        return np.frombuffer(text, dtype=self.dtype)


class HuggingFaceCoder:
    """Text as the tokens of a saved Hugging Face tokenizer.

    Args:
        folder: where `save_pretrained` has put it.
    """

    def __init__(self, folder: str) -> None:
        # With the tokenizer's own bound, every document longer than its model's context gives a warning.
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, model_max_length=2**62)
        # Not `tokenizer.vocab_size`, which leaves out the tokens that were added later.
        self.vocab_size = len(self._tokenizer)
        self.dtype: np.dtype[np.integer] = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.int32)
        self.separator: int | None = self._tokenizer.eos_token_id

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(ids, dtype=self.dtype)


def check_tokenizer(folder: str) -> None:
    """Refuse a folder without a tokenizer before any text is read.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
    """
    how = "save one there with tokenizer.save_pretrained(folder), or leave tokenizer out for bytes"
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"tokenizer={folder!r} is not a folder (looked in {os.getcwd()!r}); {how}")
    if not any(Path(folder, name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise FileNotFoundError(f"tokenizer={folder!r} has neither tokenizer.json nor tokenizer_config.json; {how}")


@dataclass(kw_only=True)
class Packer:
    """Joins documents and cuts them into blocks, counting what it has read."""

    documents: Sequence[Document]
    """What to pack, in this order."""
    name: str
    """What the text is for, in error messages."""
    coder: Coder
    """Turns a document into ids."""
    block_size: int
    """Tokens in a block, S."""
    text_field: str
    """The key of the text in a JSON line."""
    max_bytes: int | None
    """Stop after this much text, in the middle of a document if need be."""
    max_blocks: int | None = None
    """Stop after this many blocks."""
    num_bytes: int = field(default=0, init=False)
    """Bytes read so far, one more for each separator."""
    num_tokens: int = field(default=0, init=False)
    """Tokens they made, separators included."""

    def blocks(self) -> Iterator[dict[str, npt.NDArray[np.integer]]]:
        """Rows with `input_ids`, `[S]`.

        Raises:
            ValueError: the text is shorter than one block, or a document cannot be read.
        """
        made = 0
        rest = np.empty(0, dtype=self.coder.dtype)
        for tokens in self._tokens():
            joined = np.concatenate([rest, tokens])
            full = len(joined) // self.block_size * self.block_size
            for start in range(0, full, self.block_size):
                yield {"input_ids": joined[start : start + self.block_size]}
                made += 1
                if made == self.max_blocks:
                    return
            rest = joined[full:]
        if made == 0:
            raise ValueError(
                f"the {self.name} text has {self.num_tokens} tokens (from {len(self.documents)} documents, "
                f"max_bytes={self.max_bytes} of them), less than one block of block_size={self.block_size}; "
                "lower block_size, give more text, raise max_bytes, or change val_fraction or seed"
            )

    def _tokens(self) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens of each document with its separator."""
        end = [] if self.coder.separator is None else [self.coder.separator]
        left = self.max_bytes
        for document in self.documents:
            if left == 0:
                return
            text = read_document(document, text_field=self.text_field)
            if left is not None:
                text = text[:left]
                left -= len(text)
            tokens = np.concatenate([self.coder.encode(text), np.asarray(end, dtype=self.coder.dtype)])
            self.num_bytes += len(text) + len(end)
            self.num_tokens += len(tokens)
            yield tokens
