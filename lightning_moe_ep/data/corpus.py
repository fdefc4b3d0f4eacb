"""Finds text and splits it: paths come in, documents to train on and documents to validate with leave.

A document is a whole text file, or one line of a JSON Lines file. Nothing is written here.
"""

import json
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

JSON_LINES = frozenset({".jsonl", ".json"})

# Folders that are not of the standard library, or that not every machine has.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One piece of text on disk."""

    path: Path
    """The file that holds it."""
    line: int = 0
    """Its line in a JSON Lines file, from 1; 0 when the whole file is the document."""
    offset: int = 0
    """Where that line starts, in bytes."""


def list_files(paths: Sequence[str] | None) -> list[Path]:
    """All files below `paths`, each once, in an order that is the same on every machine.

    Args:
        paths: files or folders, hidden ones below them left out. None: the Python standard library's sources.
    """
    found = (file for path in paths for file in _walk(Path(path))) if paths is not None else _standard_library()
    # A dict keeps the first place of a file that two of the paths lead to.
    return list({file.resolve(): None for file in found})


def check_paths(paths: Sequence[str] | None) -> None:
    """Refuse paths that do not exist or hold no text.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: there is no text file below a path.
    """
    if paths is None:
        if not any(_is_text(file) for file in _standard_library()):
            raise ValueError(
                f"this Python has no .py files in {sysconfig.get_paths()['stdlib']!r} to train on; "
                "name text files or folders in paths"
            )
        return
    if not paths:
        raise ValueError("paths is empty; name text files or folders, or leave paths out for Python's own sources")
    for path in paths:
        if not Path(path).exists():
            raise FileNotFoundError(
                f"paths: {path!r} does not exist (looked in {os.getcwd()!r}); name text files or folders"
            )
        if not any(_is_text(file) for file in _walk(Path(path))):
            raise ValueError(
                f"paths: there is no text in {path!r} (hidden, empty and binary files do not count); "
                "name a text file, a JSON Lines file or a folder with some"
            )


def list_documents(files: Sequence[Path]) -> list[Document]:
    """The documents in `files`, in order; binary and empty files have none."""
    documents: list[Document] = []
    for file in files:
        if not _is_text(file):
            continue
        if file.suffix not in JSON_LINES:
            documents.append(Document(file))
            continue
        offset = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    documents.append(Document(file, line=number, offset=offset))
                offset += len(line)
    return documents


def split_documents(
    documents: Sequence[Document], *, val_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Deal the documents out at random, each into exactly one of training and validation.

    Args:
        documents: what to split.
        val_fraction: the share of the documents for validation; each side gets at least one.
        seed: of the shuffle.

    Returns:
        The training and the validation documents, shuffled, so that any beginning of either is a fair sample.

    Raises:
        ValueError: there are fewer than two documents.
    """
    if len(documents) < 2:
        where = f" ({documents[0].path})" if documents else ""
        raise ValueError(
            f"the text has {len(documents)} document{where}, and training and validation need one each; "
            "add a file to paths, or use a JSON Lines file with a document a line"
        )
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    num_val = min(max(1, round(len(shuffled) * val_fraction)), len(shuffled) - 1)
    return shuffled[num_val:], shuffled[:num_val]


def read_document(document: Document, *, text_field: str) -> bytes:
    """The text of one document, as UTF-8 for a JSON line and as it lies on disk otherwise.

    Args:
        document: what to read.
        text_field: the key of the text in a JSON line.

    Raises:
        ValueError: the line is not a JSON object with a string in `text_field`.
    """
    if document.line == 0:
        return document.path.read_bytes()
    with document.path.open("rb") as file:
        file.seek(document.offset)
        line = file.readline()
    where = f"{document.path}:{document.line}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{where} is not JSON ({error}); {' and '.join(sorted(JSON_LINES))} files must hold one JSON object a line"
        ) from None
    if not isinstance(fields, dict) or not isinstance(fields.get(text_field), str):
        held = f"the fields {sorted(fields)}" if isinstance(fields, dict) else f"a {type(fields).__name__}"
        raise ValueError(
            f"{where} has no text in the field {text_field!r}, but {held}; set text_field to the right one"
        )
    # A JSON string may hold half of a surrogate pair, which UTF-8 cannot.
    return fields[text_field].encode("utf-8", errors="replace")


def _walk(path: Path, *, leave_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        # In place: os.walk descends into what is left of the list.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return (file for file in _walk(root, leave_out=_NOT_LIBRARY) if file.suffix == ".py")


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        start = opened.read(8192)
    # The rule by which git tells text from binary.
    return bool(start) and b"\0" not in start
