"""What is said of a checkpoint, and what its weights show by themselves, whatever form it has."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_moe_ep.checkpoint.stored import Stored

CHUNK = 64 * 2**20
"""Bytes that are looked at at a time."""


@dataclass
class Report:
    """What was found; `as_dict` for programs, `text` for people."""

    path: str
    form: str
    """folder, file, or huggingface."""
    size: int
    """Bytes on disk."""
    parameters: int = 0
    """Elements of all weights."""
    dtypes: dict[str, int] = field(default_factory=dict)
    """Elements by dtype."""
    experts: dict[str, int] = field(default_factory=dict)
    """E by the path of the experts."""
    layout: dict[str, int] | None = None
    """At which it was saved."""
    step: int | None = None
    """Optimizer steps taken."""
    optimizers: int = 0
    """How many have their state here."""
    missing: list[str] = field(default_factory=list)
    """Files and tensors."""
    findings: list[str] = field(default_factory=list)
    """What is wrong."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def text(self) -> str:
        by_count: dict[int, list[str]] = defaultdict(list)
        for name, count in self.experts.items():
            by_count[count].append(name)
        layout = ", ".join(f"{name} {size}" for name, size in (self.layout or {}).items())
        lines = [
            f"{self.path}: {_FORMS[self.form]}, {self.size / 2**20:,.1f} MiB",
            f"  parameters  {self.parameters:,} ({', '.join(f'{n:,} {dtype}' for dtype, n in self.dtypes.items())})",
            *(
                f"  experts     {count} in each of {len(names)} layers: {names[0]}{' ...' if names[1:] else ''}"
                for count, names in by_count.items()
            ),
        ]
        if self.form != "huggingface":
            lines += [
                f"  saved at    {layout or 'a layout that is not noted'}, step {self.step}",
                f"  optimizers  {self.optimizers or 'none: weights only'}",
            ]
        lines += [f"  missing     {name}" for name in self.missing]
        lines += [f"WRONG: {finding}" for finding in self.findings] or ["Nothing wrong was found."]
        return "\n".join(lines)


_FORMS = {
    "folder": "a sharded checkpoint",
    "file": "a checkpoint in one file",
    "huggingface": "a Hugging Face folder",
}


class Look:
    """One look at a tensor's values, a few rows at a time."""

    def __init__(self, stored: Stored, *, digests: bool = False) -> None:
        """
        Args:
            stored: the tensor.
            digests: whether to make a digest of each row.
        """
        self.odd = 0
        """How many NaN and Inf there are."""
        self.is_nonzero = False
        self.digests: list[bytes] = []
        for start, stop in stored.spans(CHUNK):
            values = stored.read(start, stop)
            self.is_nonzero = self.is_nonzero or bool((values != 0).any())
            if values.dtype.is_floating_point:
                checked = values.float() if values.dtype.itemsize == 1 else values
                self.odd += int((~checked.isfinite()).sum())
            if digests:
                self.digests += [_digest(row) for row in values]


def _digest(row: Tensor) -> bytes:
    return hashlib.blake2b(row.contiguous().reshape(-1).view(torch.uint8).numpy(), digest_size=16).digest()


def look_at_weights(report: Report, weights: Mapping[str, Stored], experts: Mapping[str, int]) -> None:
    """Count, and find what is not finite, experts that are missing, and experts that are equal.

    Args:
        report: what is found goes here.
        weights: by name.
        experts: E by the path of the experts, where it is known; else names and shapes tell.
    """
    of_experts: dict[str, dict[int, dict[str, bytes]]] = defaultdict(lambda: defaultdict(dict))
    for name, stored in weights.items():
        count = stored.shape.numel()
        report.parameters += count
        dtype = str(stored.dtype).removeprefix("torch.")
        report.dtypes[dtype] = report.dtypes.get(dtype, 0) + count
        part = _part_of_experts(name, stored, experts, weights)
        look = Look(stored.as_row() if part and part.number is not None else stored, digests=part is not None)
        if look.odd:
            report.findings.append(f"{name} has {look.odd} NaN or Inf")
        for row, digest in enumerate(look.digests):
            assert part is not None
            of_experts[part.path][row if part.number is None else part.number][part.name] = digest
    for path, by_number in of_experts.items():
        report.experts[path] = max(by_number) + 1
        if missing := sorted(set(range(max(by_number))) - by_number.keys()):
            report.missing += [f"{path}.{number}" for number in missing]
            report.findings.append(f"{path} has {len(by_number)} experts up to {max(by_number)}, but not {missing[0]}")
        first: dict[frozenset[tuple[str, bytes]], int] = {}
        for number in sorted(by_number):
            same = first.setdefault(frozenset(by_number[number].items()), number)
            if same != number:
                report.findings.append(f"the experts {same} and {number} of {path} are equal")
    for path, number in experts.items():
        if path in report.experts and report.experts[path] != number:
            report.findings.append(f"{path} has {report.experts[path]} experts; {number} were saved")
        report.experts[path] = number


@dataclass(frozen=True)
class _Part:
    """Of a tensor: of which experts it is."""

    path: str

    name: str

    number: int | None
    """Of which expert; None: of all, one a row."""


def _part_of_experts(
    name: str, stored: Stored, experts: Mapping[str, int], weights: Mapping[str, Stored]
) -> _Part | None:
    path = next((path for path in experts if name.startswith(f"{path}.")), None)
    if path is not None:
        rest = name.removeprefix(f"{path}.")
        number, _, inner = rest.partition(".")
        if number.isdigit():
            return _Part(path, inner, int(number))
        return _Part(path, rest, None) if stored.shape and stored.shape[0] == experts[path] else None
    if found := re.fullmatch(r"((?:.*\.)?experts)\.(\d+)\.(.+)", name):
        return _Part(found[1], found[3], int(found[2]))
    if found := re.fullmatch(r"((?:.*\.)?experts)\.([^.]+)", name):
        # Stacked weights have three dimensions, and their biases as many rows.
        stacked = [t.shape[0] for other, t in weights.items() if other.startswith(f"{found[1]}.") and len(t.shape) == 3]
        if stacked and len(stored.shape) > 1 and stored.shape[0] == stacked[0]:
            return _Part(found[1], found[2], None)
    return None


def compare_counts(report: Report, prefix: str, config: Mapping[str, Any]) -> None:
    """Whether there are as many experts as a configuration says.

    Args:
        report: has the experts.
        prefix: of the paths that the configuration is for.
        config: of transformers, as JSON.
    """
    allowed = set(_counts(config))
    for path, number in report.experts.items():
        if path.startswith(prefix) and allowed and number not in allowed:
            report.findings.append(f"{path} has {number} experts; the configuration says {sorted(allowed)}")


def _counts(config: Mapping[str, Any]) -> Iterator[int]:
    """All numbers of experts in a configuration, and those in it for text or images."""
    zero = config.get("zero_expert_num")
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif re.search("experts|routed", key) and not re.search("per_tok|shared|top_?k|groups?$|scal", key):
            numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int) and n > 1]
            # A list is of kinds of experts, or of layers; kinds may be together on disk.
            yield from numbers
            yield from [sum(numbers)] if numbers else []
            if isinstance(zero, int):
                yield from (number + zero for number in numbers)
