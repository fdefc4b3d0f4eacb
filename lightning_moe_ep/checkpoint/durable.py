"""A checkpoint on disk counts only when it is complete: the steps by which it gets to its place, and leaves it.

Each step may be the last one before a crash. What is being written lies beside its place NAME, as `.NAME.saving`; it
is on the disk before it takes the name, in one step; and a folder that is removed loses its name first. Where the file
system cannot exchange two names, what has the name is set aside as `.NAME.old`, and `recover` gives the name back to it
if nothing else took it. This is one process's work: paths go in, nothing here knows of ranks.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import zlib
from contextlib import suppress
from pathlib import Path

MARKER = "complete.json"
"""In a folder that is complete: `{"format": 1, "files": {name: bytes}, "ends": {name: sum}}`, with all other files."""

FORMAT = 1

END = 2**16
"""Bytes at both ends of a file that are summed up: shards of two saves, of equal size, are told apart by them."""


def saving_place(path: Path) -> Path:
    """Where the checkpoint that is to be at `path` is written."""
    return path.with_name(f".{path.name}.saving")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, if they are not there."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync(path.parent)


def seal(folder: Path) -> None:
    """Say that a folder is complete: its files, which are on the disk already, get listed in its marker."""
    files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    marker = folder / MARKER
    ends = {name: _sum_of_ends(folder / name) for name in sorted(files)}
    marker.write_text(json.dumps({"format": FORMAT, "files": dict(sorted(files.items())), "ends": ends}, indent=1))
    sync(marker)
    sync(folder)


def check_complete(folder: Path) -> None:
    """Compare a folder with its marker; one without a marker (stock Lightning's) is taken as it is.

    Raises:
        ValueError: the marker cannot be read, or a file is missing or has another size; names them.
    """
    marker = folder / MARKER
    if not marker.is_file():
        return
    try:
        record = json.loads(marker.read_text())
        version, files, ends = record["format"], dict(record["files"]), dict(record.get("ends", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{marker}, which lists the files of the checkpoint, is broken: {error!r}") from None
    if version != FORMAT:
        raise ValueError(f"{marker} has the format {version}; this version of lightning_moe_ep reads {FORMAT}")
    wrong = []
    for name, size in files.items():
        file = folder / name
        if not file.is_file():
            wrong.append(f"{name} is missing")
        elif (found := file.stat().st_size) != size:
            wrong.append(f"{name} has {found:,} bytes instead of {size:,}")
        elif name in ends and _sum_of_ends(file) != ends[name]:
            wrong.append(f"{name} is not the file that was saved, but one of another save, or damaged")
    if wrong:
        raise ValueError(
            f"the checkpoint {folder} is incomplete: {'; '.join(wrong[:5])}{'; ...' if len(wrong) > 5 else ''}. Copy"
            " it again, or use another checkpoint"
        )


def _sum_of_ends(file: Path) -> int:
    with file.open("rb") as stream:
        first = stream.read(END)
        stream.seek(max(0, file.stat().st_size - END))
        return zlib.crc32(stream.read(END), zlib.crc32(first))


def put_in_place(new: Path, path: Path) -> None:
    """Give what is complete and on the disk its name; what had the name before, of whatever kind, is removed.

    Args:
        new: a file, a folder or a link, in the folder of `path`.
        path: what it is to be called.
    """
    old = _aside(path)
    if os.path.lexists(path):
        if _exchange(new, path):
            old = new
        elif not _is_folder(new) and not _is_folder(path):
            os.replace(new, path)
        else:
            delete(old)
            os.rename(path, old)
            os.rename(new, path)
    else:
        os.rename(new, path)
    sync(path.parent)
    with suppress(OSError):  # the save is done; what cannot be removed now is removed by the next one
        delete(old)


def link(target: Path, path: Path) -> None:
    """Make `path` a link to `target`, relative and in one step, whatever it was before."""
    new = saving_place(path)
    delete(new)
    os.symlink(os.path.relpath(target, path.parent), new)
    put_in_place(new, path)


def discard(path: Path) -> None:
    """Remove a checkpoint of any form; a folder is no checkpoint any more before it loses a file."""
    delete(_aside(path))
    going = path.with_name(f".{path.name}.removing")
    delete(going)
    if _is_folder(path):
        os.rename(path, going)
        delete(going)
    else:
        delete(path)


def clean(path: Path) -> None:
    """Remove what a save to `path`, and removals in its folder, left behind when they were interrupted."""
    delete(saving_place(path))
    for going in path.parent.glob(".*.removing"):
        delete(going)


def recover(path: Path) -> None:
    """If a save was interrupted just when it replaced what was at `path`, put that back."""
    old = _aside(path)
    if not os.path.lexists(path) and os.path.lexists(old):
        with suppress(FileNotFoundError):  # another process was faster
            os.rename(old, path)


def recover_all(folder: Path) -> None:
    """`recover` for whatever was set aside in a folder."""
    for old in folder.glob(".*.old"):
        recover(folder / old.name[1 : -len(".old")])


def delete(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a folder, if it is there."""
    if _is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems know no fsync of a folder.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(handle)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step; whether system and file system could.

    Linux's local file systems can. NFS and others cannot.
    """
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc has it since 2.28
    here, exchange = -100, 2  # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h
    return renameat2 is not None and renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
