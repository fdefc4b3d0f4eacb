"""From a Trainer's checkpoint to a Hugging Face folder, in one process and a bounded part of the memory."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from lightning_moe_ep.checkpoint.disk_form import Group, convert, plan_groups
from lightning_moe_ep.checkpoint.durable import saving_place, sync
from lightning_moe_ep.checkpoint.rebuilt import origin_of, plain_weights
from lightning_moe_ep.checkpoint.safetensors_writer import SafetensorsFiles
from lightning_moe_ep.checkpoint.stored import open_checkpoint

MAX_MEMORY = "4GiB"
MAX_SHARD_SIZE = "3GiB"
"""Below the bound on memory, so that who reads a file whole stays below it, too."""

TOKENIZER_FILES = re.compile(
    r"tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|.*\.tiktoken|spiece\.model"
    r"|chat_template\..*|((video_)?pre)?processor_config\.json"
)
"""What is copied of a folder with a tokenizer."""


def export_to_hugging_face(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    max_memory: str = MAX_MEMORY,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
    model: str | None = None,
) -> Path:
    """Write the model of a Trainer's checkpoint as a folder for `from_pretrained` of transformers.

    Args:
        checkpoint: a checkpoint, folder or file.
        folder: where to; it must be empty, or not there.
        dtype: of the weights, such as "bfloat16"; None: as they were saved.
        max_shard_size: how large a file may be, such as "500MB".
        max_memory: how much of the weights may be in memory at a time. A single expert always is, and so is what
            transformers can convert as a whole only.
        tokenizer: a folder to copy tokenizer files from; None: that of the run, if it is known and there.
        config: the model's config.json, or its folder, where the checkpoint does not say it.
        model: the model's path in the LightningModule, if there are several.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder is not empty.
        ValueError: it is no checkpoint, is damaged, or holds no model of transformers.
        OSError: there is too little space.
    """
    target = Path(folder).absolute()
    check_free_place(target)
    bound = size_in_bytes(max_memory)
    cast = dtype_of(dtype)
    opened = open_checkpoint(Path(checkpoint))
    origin = origin_of(opened, config=Path(config) if config is not None else None, model=model)
    plain = origin.build()
    weights = plain_weights(opened, origin, plain)
    dtypes = target_dtypes(plain, {name: stored.dtype for name, stored in weights.items()}, cast)
    groups = plan_groups(plain, dtypes)
    source = tokenizer_folder(opened.rest) if tokenizer is None else Path(tokenizer)
    pretrained = _trained_from(opened.rest)
    if plain.can_generate() and pretrained is not None and (Path(pretrained) / "generation_config.json").is_file():
        plain.generation_config = GenerationConfig.from_pretrained(str(pretrained))
    if tokenizer is not None and not (source and source.is_dir()):
        raise FileNotFoundError(f"tokenizer={str(tokenizer)!r} is not a folder")

    def read(name: str, start: int, stop: int) -> Tensor:
        return weights[name].read(start, stop).to(dtypes[name])

    with new_folder(target, nbytes=total_bytes(groups)) as saving:
        files = start_folder(saving, plain, groups, dtypes, max_shard_size=max_shard_size, tokenizer=source)
        for group in groups:
            for rows in convert(plain, group, read, max_bytes=bound):
                files.write(rows.name, rows.first, rows.values)
    return target


def start_folder(
    folder: Path,
    plain: PreTrainedModel,
    groups: list[Group],
    dtypes: Mapping[str, torch.dtype],
    *,
    max_shard_size: str,
    tokenizer: Path | None,
) -> SafetensorsFiles:
    """Write all but the weights, for which there is then a place."""
    targets = {name: tensor for group in groups for name, tensor in group.targets.items()}
    files = SafetensorsFiles(folder, targets, max_shard_bytes=size_in_bytes(max_shard_size))
    config = copy.deepcopy(plain.config)
    config.architectures = [type(plain).__name__]
    floating = [dtypes[name] for name, _ in plain.named_parameters() if dtypes[name].is_floating_point]
    if floating:
        config.dtype = str(max(set(floating), key=floating.count)).removeprefix("torch.")
    config.save_pretrained(folder)
    if plain.can_generate():
        plain.generation_config.save_pretrained(folder)
    for file in sorted(tokenizer.iterdir()) if tokenizer is not None else ():
        if file.is_file() and TOKENIZER_FILES.fullmatch(file.name):
            shutil.copyfile(file, folder / file.name)
    return files


def target_dtypes(
    model: PreTrainedModel, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """In which dtype each tensor is written: what the family keeps in fp32, integers and buffers stay as they are."""
    if dtype is None:
        return dict(dtypes)
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: dtype
        if name in parameters and own.is_floating_point and not any(f".{part}." in f".{name}." for part in kept)
        else own
        for name, own in dtypes.items()
    }


def tokenizer_folder(rest: Mapping[str, Any]) -> Path | None:
    """Where the run's tokenizer is, by what a checkpoint keeps of the model's and the data's hyperparameters."""
    known = (rest.get("datamodule_hyper_parameters") or {}).get("tokenizer")
    for folder in (known, _trained_from(rest)):
        if isinstance(folder, str | Path) and Path(folder).is_dir():
            return Path(folder)
    if known is not None:
        warnings.warn(
            f"the tokenizer {str(known)!r} of the run is not there from here, so the folder has none; name one with"
            " tokenizer",
            stacklevel=3,
        )
    return None


def _trained_from(rest: Mapping[str, Any]) -> str | Path | None:
    """The folder that a `CausalLMModule` was built from."""
    known = rest.get("hyper_parameters") or {}
    return known.get("pretrained") or (known.get("config") or {}).get("_name_or_path")


def total_bytes(groups: list[Group]) -> int:
    """On disk."""
    return sum(tensor.nbytes for group in groups for tensor in group.targets.values())


def check_free_place(path: Path) -> None:
    """
    Raises:
        FileExistsError: something is there already.
    """
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} is there already; give another place, or remove it first")


@contextmanager
def new_folder(path: Path, *, nbytes: int) -> Iterator[Path]:
    """A folder to write into, which is moved to its place when complete, and removed if it is not.

    Raises:
        OSError: there is too little space for so many bytes.
    """
    saving = saving_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(saving, ignore_errors=True)
    check_space(path.parent, nbytes)
    saving.mkdir()
    try:
        yield saving
        for file in saving.iterdir():
            sync(file)
        if path.is_dir():
            path.rmdir()
        saving.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise


def check_space(folder: Path, nbytes: int) -> None:
    """
    Raises:
        OSError: there is too little space for so many bytes.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(f"{folder} has {free / 2**20:,.1f} MiB free, but {nbytes / 2**20:,.1f} MiB are needed")


def dtype_of(name: str | None) -> torch.dtype | None:
    """
    Raises:
        ValueError: it is no floating point dtype's name.
    """
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype={name!r} is not one of float32, bfloat16, float16, float64")
    return dtype


_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}{end}": base**n for n, letter in enumerate("kmgt", 1) for end, base in (("b", 1000), ("ib", 1024))},
}


def size_in_bytes(size: str | int) -> int:
    """From such as "4GiB", "500MB" or a number.

    Raises:
        ValueError: it is no size, or not above 0.
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(size).lower())
    with contextlib.suppress(ValueError):
        if found and found[2] in _UNITS and (number := int(float(found[1]) * _UNITS[found[2]])) > 0:
            return number
    raise ValueError(f"{size!r} is not a size; write it as 4GiB, 500MB or a number of bytes")
