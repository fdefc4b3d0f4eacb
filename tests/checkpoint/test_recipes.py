"""Parts of tensors that are made of parts of files, against the same made of whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from lightning_moe_ep.checkpoint.recipes import Computed, Concatenated, Narrowed, Recipe, Stacked, Stored, Transposed
from lightning_moe_ep.checkpoint.safetensors_files import (
    SHORT_RUN,
    OpenFiles,
    Region,
    stored_tensors,
    whole,
)

GATE, UP = [torch.randn(5, 6, generator=torch.Generator().manual_seed(n)) for n in range(4)], torch.arange(120.0)
DOWN = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stored]:
    folder = tmp_path_factory.mktemp("weights")
    tensors = {f"gate.{n}": tensor for n, tensor in enumerate(GATE)}
    save_file(
        {**tensors, "up": UP.view(4, 5, 6), "down": DOWN, "scale": torch.tensor(3.0)}, folder / "model.safetensors"
    )
    return {name: Stored(tensor) for name, tensor in stored_tensors(folder).items()}


def interleaved(stored: dict[str, Stored]) -> Recipe:
    def compute(region: Region, files: OpenFiles) -> Tensor:
        part = torch.empty([r.stop - r.start for r in region])
        stored["up"].read_into(part, region, files)
        return part.flip(1)

    return Computed(compute, stored["up"].sources, stored["up"].shape, mixed=[1])


CASES: dict[str, tuple[Callable[[dict[str, Stored]], Recipe], Tensor]] = {
    "stored": (lambda s: s["down"], DOWN),
    "stacked": (lambda s: Stacked([s[f"gate.{n}"] for n in range(4)]), torch.stack(GATE)),
    "gate and up": (
        lambda s: Concatenated([Stacked([s[f"gate.{n}"] for n in range(4)]), s["up"]], -2),
        torch.cat([torch.stack(GATE), UP.view(4, 5, 6)], dim=1),
    ),
    "transposed": (lambda s: Transposed(s["down"], 1, 2), DOWN.transpose(1, 2)),
    "stacked, transposed": (
        lambda s: Transposed(Stacked([s[f"gate.{n}"] for n in range(4)]), -1, -2),
        torch.stack(GATE).transpose(1, 2),
    ),
    "a third": (lambda s: Narrowed(s["down"], 1, 2, 2), DOWN[:, 2:4]),
    "mixed": (interleaved, UP.view(4, 5, 6).flip(1)),
}


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_part(stored: dict[str, Stored], case: str, data: st.DataObject) -> None:
    build, right = CASES[case]
    recipe = build(stored)
    assert recipe.shape == right.shape
    region = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in right.shape
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    with OpenFiles() as files:
        out = torch.full(right[region].shape, float("nan"), dtype=dtype)
        recipe.read_into(out, region, files)
        assert torch.equal(out, right[region].to(dtype))
        planned = sum(length for tensor, part in recipe.sources(region) for _, length in tensor.runs(part))
        assert files.bytes_read == planned


def test_a_number(stored: dict[str, Stored]) -> None:
    with OpenFiles() as files:
        assert stored["scale"].tensor.read((), files) == 3


def test_rows_are_read_alone_and_short_pieces_in_one_go(tmp_path: Path) -> None:
    long = torch.randn(4, 3, SHORT_RUN // 4)
    short = torch.randn(8, 6)
    save_file({"long": long, "short": short}, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    with OpenFiles() as files:
        part = (slice(1, 3), slice(0, 2), slice(0, SHORT_RUN // 4))
        assert torch.equal(stored["long"].read(part, files), long[part])
        assert files.bytes_read == long[part].numel() * 4
        assert len(stored["long"].runs(part)) == 2
        files.bytes_read = 0
        part = (slice(2, 4), slice(1, 2))
        assert torch.equal(stored["short"].read(part, files), short[part])
        assert files.bytes_read == 2 * 6 * 4  # whole rows, but those two only


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    save_file({"first": torch.ones(4), "last": torch.ones(1000)}, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(stored["last"].offset + 8)
    with OpenFiles() as files:
        stored["first"].read(whole([4]), files)
        with pytest.raises(ValueError, match=r"model\.safetensors ends within tensor last; it is cut short"):
            stored["last"].read(whole([1000]), files)


def test_what_cannot_be_put_together(stored: dict[str, Stored]) -> None:
    with pytest.raises(ValueError, match=r"shapes \[5, 6\] and \[4, 6, 5\] cannot be stacked"):
        Stacked([stored["gate.0"], stored["down"]])
    with pytest.raises(ValueError, match="cannot be concatenated along 0"):
        Concatenated([stored["up"], stored["down"]], 0)
