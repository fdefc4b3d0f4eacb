"""The commands beside LightningCLI's.

`export` and `inspect` look at what a run has left, `plan` at one to come; `verify` compares one with a single process.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from jsonargparse import ArgumentParser

from lightning_moe_ep.checkpoint.convert import convert_to_file, convert_to_folder
from lightning_moe_ep.checkpoint.export import MAX_MEMORY, MAX_SHARD_SIZE, export_to_hugging_face
from lightning_moe_ep.checkpoint.inspection import inspect_path
from lightning_moe_ep.cli.plan import DESCRIPTION, run_plan
from lightning_moe_ep.tools import verify


def export(
    checkpoint: str,
    out: str,
    to: Literal["huggingface", "file", "folder"] = "huggingface",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: str | None = None,
    max_memory: str = MAX_MEMORY,
    tokenizer: str | None = None,
    config: str | None = None,
    model: str | None = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, or from one of the Trainer's forms to the other.

    Args:
        checkpoint: A Trainer's checkpoint, folder or file.
        out: Where to; nothing may be there.
        to: "huggingface", a folder for from_pretrained; "file", one Lightning file that resumes; "folder", a sharded
            checkpoint that resumes.
        dtype: Of the weights in a Hugging Face folder; as they were saved if not given.
        max_shard_size: How large a file of a Hugging Face folder may be, such as 500MB; 3GiB if not given.
        max_memory: How much of the weights may be in memory at a time.
        tokenizer: A folder with a tokenizer for the Hugging Face folder, if not that of the run.
        config: The model's config.json, or its folder, if the checkpoint does not say it.
        model: The model's path in the LightningModule, if it holds several.
    """
    for_hugging_face = {
        "dtype": dtype,
        "max_shard_size": max_shard_size,
        "tokenizer": tokenizer,
        "config": config,
        "model": model,
    }
    given = [name for name, value in for_hugging_face.items() if value is not None]
    if to != "huggingface" and given:
        raise ValueError(f"--{given[0]} is for Hugging Face folders; leave it out with --to {to}")
    if to == "huggingface":
        export_to_hugging_face(
            checkpoint,
            out,
            dtype=dtype,
            max_shard_size=max_shard_size or MAX_SHARD_SIZE,
            max_memory=max_memory,
            tokenizer=tokenizer,
            config=config,
            model=model,
        )
    else:
        (convert_to_file if to == "file" else convert_to_folder)(checkpoint, out, max_memory=max_memory)
    print(f"Written: {out}")


def _export(args: Sequence[str]) -> int:
    parser = ArgumentParser(prog="lightning-moe-ep export", description=COMMANDS["export"][0])
    parser.add_function_arguments(export, as_positional=True)
    # Also --max-memory, as other programs spell it.
    args = [re.sub("^--[a-z-]+", lambda option: "--" + option[0][2:].replace("-", "_"), arg) for arg in args]
    try:
        export(**parser.parse_args(args).as_dict())
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _inspect(args: Sequence[str]) -> int:
    parser = ArgumentParser(prog="lightning-moe-ep inspect", description=COMMANDS["inspect"][0])
    parser.add_argument("path", type=str, help="A Trainer's checkpoint, folder or file, or a Hugging Face folder.")
    parser.add_argument("--json", action="store_true", help="Print JSON, for programs.")
    given = parser.parse_args(list(args))
    try:
        report = inspect_path(given.path)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), indent=2) if given.json else report.text())
    return 1 if report.findings else 0


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "export": ("Write a checkpoint as a Hugging Face folder, as one file or as a sharded folder.", _export),
    "inspect": ("Show what a checkpoint or a Hugging Face folder holds, and what is wrong with it.", _inspect),
    "plan": (DESCRIPTION, run_plan),
    "verify": (verify.DESCRIPTION, verify.command),
}
"""By its name what a command does, and what runs it: from its arguments to the exit status."""
