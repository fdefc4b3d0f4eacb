"""What a checkpoint or a Hugging Face folder holds, and what is wrong with it, without loading it whole.

The values are looked at once, a few rows at a time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_moe_ep.checkpoint.durable import MARKER, check_complete, saving_place
from lightning_moe_ep.checkpoint.looking import Look, Report, compare_counts, look_at_weights
from lightning_moe_ep.checkpoint.pretrained import problems_of
from lightning_moe_ep.checkpoint.safetensors_files import INDEX, SINGLE
from lightning_moe_ep.checkpoint.stored import META, DamagedError, Stored, StoredCheckpoint, open_checkpoint


def inspect_path(path: str | Path) -> Report:
    """Look at a Trainer's checkpoint of either form, or at a Hugging Face folder.

    Raises:
        FileNotFoundError: there is nothing.
        NotACheckpointError: it is none of these.
    """
    path = Path(path)
    interrupted = saving_place(path)
    if path.exists() and path.name.startswith(".") and path.name.endswith(".saving"):
        report = Report(str(path), "folder" if path.is_dir() else "file", _size(path))
        report.findings.append("it is what an interrupted save has left; it is incomplete and can be removed")
        return report
    if not path.exists():
        more = f"; {interrupted} is what an interrupted save has left" if interrupted.exists() else ""
        raise FileNotFoundError(f"{path} does not exist{more}")
    if path.is_dir() and not (path / META).exists() and _model_files(path):
        report = _hugging_face(path)
    else:
        report = _checkpoint(path)
    if interrupted.exists():
        report.findings.append(f"a save was interrupted: {interrupted} is incomplete and can be removed")
    return report


def _size(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


# A Trainer's checkpoint.


def _checkpoint(path: Path) -> Report:
    report = Report(str(path), "folder" if path.is_dir() else "file", _size(path))
    if path.is_dir():
        _check_marker(path, report)
    try:
        opened = open_checkpoint(path)
    except DamagedError as error:
        report.findings.append(str(error))
        return report
    try:
        _look(report, opened)
    except DamagedError as error:
        report.findings.append(str(error))
    return report


def _look(report: Report, opened: StoredCheckpoint) -> None:
    record = opened.record
    report.layout, report.step = record.get("layout"), opened.rest.get("global_step")
    report.optimizers = len(opened.optimizers)
    look_at_weights(report, opened.tensors, record.get("experts", {}))
    for name, model in record.get("models", {}).items():
        compare_counts(report, f"{name}." if name else "", model["config"])
    for number, optimizer in enumerate(opened.optimizers):
        _look_at_moments(report, number, optimizer)


def _check_marker(path: Path, report: Report) -> None:
    """By the list that a save writes last; another strategy's folder has none."""
    marker = path / MARKER
    if not marker.exists():
        if (path / META).exists() and not (path / ".metadata").exists():
            report.findings.append(f"{path} is incomplete: it has no .metadata")
        return
    files = _listed(marker, "files", report)
    report.missing += [name for name in files if not (path / name).exists()]
    try:
        check_complete(path)
    except ValueError as error:
        if not report.findings:
            report.findings.append(str(error))


def _listed(path: Path, key: str, report: Report) -> dict[str, Any]:
    """What a file of JSON lists under a key."""
    try:
        return dict(json.loads(path.read_text())[key])
    except (ValueError, KeyError, TypeError) as error:
        report.findings.append(f"{path.name} is damaged: {error!r}")
        return {}


def _look_at_moments(report: Report, number: int, optimizer: Mapping[str, Any]) -> None:
    """Non-finite numbers, and moments that are zero though steps were taken."""
    nonzero: dict[str, dict[Any, bool]] = defaultdict(dict)
    for name, state in optimizer["state"].items():
        for key, value in state.items():
            if isinstance(value, Stored) and value.dtype.is_floating_point:
                look = Look(value)
                if look.odd:
                    report.findings.append(f"optimizer {number}: {key} of {name} has {look.odd} NaN or Inf")
                if key != "step" and value.shape:
                    nonzero[key][name] = look.is_nonzero
    for key, by_name in nonzero.items() if report.step else ():
        if not any(by_name.values()):
            report.findings.append(f"optimizer {number}: {key} is zero everywhere after {report.step} steps")
            continue
        # That no expert of a layer has ever had a gradient is not to be expected; of another parameter it may be.
        report.findings += [
            f"optimizer {number}: {key} of {name}, of all experts, is zero after {report.step} steps"
            for name, any_nonzero in by_name.items()
            if not any_nonzero and any(str(name).startswith(f"{path}.") for path in report.experts)
        ]


# A Hugging Face folder.


def _model_files(path: Path) -> list[Path]:
    return [file for file in sorted(path.iterdir()) if file.name in (INDEX, "config.json") or _is_weights(file.name)]


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _hugging_face(path: Path) -> Report:
    report = Report(str(path), "huggingface", _size(path))
    files = [file.name for file in path.iterdir() if _is_weights(file.name)]
    named: dict[str, str] = {}
    if (path / SINGLE).exists():
        files = [SINGLE]
        if (path / INDEX).exists():
            report.findings.append(f"{SINGLE} is what is read; {INDEX} beside it is left from another save")
    elif (path / INDEX).exists():
        named = _listed(path / INDEX, "weight_map", report)
        files = sorted(set(named.values()))
    elif not files:
        report.findings.append("there are no weights: neither model.safetensors nor an index of several files")
    weights: dict[str, Stored] = {}
    for name in files:
        if not (path / name).exists():
            report.missing.append(name)
            report.findings.append(f"{name}, which the index names, is missing")
            continue
        try:
            weights.update(_safetensors(path / name))
        except SafetensorError as error:
            report.findings.append(f"{name} is cut off or damaged: {error}")
            named = {tensor: file for tensor, file in named.items() if file != name}
    lost = [tensor for tensor, file in named.items() if tensor not in weights and file not in report.missing]
    report.missing += lost
    report.findings += [f"{tensor}, which the index names, is not in {named[tensor]}" for tensor in lost]
    look_at_weights(report, weights, {})
    if not (path / "config.json").exists():
        report.missing.append("config.json")
    elif not report.findings:
        report.findings += problems_of(path)
        if report.experts:
            compare_counts(report, "", json.loads((path / "config.json").read_text()))
    return report


def _safetensors(path: Path) -> dict[str, Stored]:
    found = {}
    # It stays open, as long as one of the tensors is there: opening reads all names.
    file = safe_open(path, "pt")
    for name in file.keys():  # noqa: SIM118  (it is no dictionary)
        rows = file.get_slice(name)
        shape = torch.Size(rows.get_shape())
        # A 0-dimensional tensor has no rows to read some of; it tells the dtype, as an empty part of others does.
        example = rows[:0] if shape else file.get_tensor(name)
        found[name] = Stored(shape, example.dtype, partial(_read_rows, file, name))
    return found


def _read_rows(file: safe_open, name: str, start: int, stop: int) -> Tensor:
    rows = file.get_slice(name)
    return rows[start:stop] if rows.get_shape() else file.get_tensor(name)
