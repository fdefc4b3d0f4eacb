"""What is read of a checkpoint, some rows at a time, is what torch and Lightning read of it whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

# Private; read at lightning 2.6.6.
from lightning.fabric.utilities.load import _METADATA_FILENAME, _load_distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_moe_ep.checkpoint import stored
from lightning_moe_ep.checkpoint.layout_on_disk import data_offset, load_without_data
from lightning_moe_ep.checkpoint.stored import DamagedError, Item, NotACheckpointError, Stored, open_checkpoint
from lightning_moe_ep.trees import map_leaves
from tests.checkpoint.runs import MIXED, Run, on
from tests.pool import RankPool


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both forms of one run, with uneven shards."""
    folder = tmp_path_factory.mktemp("saved")
    for form in ("folder", "file"):
        on(ranks, Run(MIXED, form, "6 experts of odd width", max_steps=2, save=str(folder / form)))
    return folder


def whole(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, Stored) else leaf, tree)


def check_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            check_same(ours[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for mine, right in zip(ours, theirs, strict=True):
            check_same(mine, right)
    else:
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs


def test_a_folder_is_what_lightning_reads(saved: Path) -> None:
    opened, right = open_checkpoint(saved / "folder"), _load_distributed_checkpoint(saved / "folder")
    assert opened.is_folder
    check_same(whole(opened.weights), right.pop("state_dict"))
    check_same(whole(opened.optimizers), [right.pop("optimizer_0")])
    check_same(opened.rest, right)
    assert opened.record["layout"] == {"replicate": 1, "efsdp": 2, "ep": 2, "cp": 1}


def test_a_file_is_what_torch_reads(saved: Path) -> None:
    opened, right = open_checkpoint(saved / "file"), torch.load(saved / "file", weights_only=True)
    assert not opened.is_folder
    check_same(whole(opened.weights), dict(right.pop("state_dict")))
    check_same(whole(opened.optimizers), right.pop("optimizer_states"))
    check_same(opened.rest, right)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_rows(saved: Path, form: str) -> None:
    for name, tensor in open_checkpoint(saved / form).tensors.items():
        right = tensor.whole()
        for start in range(0, tensor.num_rows, 2):
            for stop in range(start, min(start + 5, tensor.num_rows) + 1):
                assert torch.equal(tensor.read(start, stop), right[start:stop]), name
        spans = list(tensor.spans(100))
        assert torch.equal(torch.cat([tensor.read(*span) for span in spans]), right)
        assert len(spans) == min(tensor.num_rows, -(-tensor.num_rows // max(1, 100 // right[0].nbytes)))


def test_what_is_read_is_memory_of_its_own(saved: Path) -> None:
    opened = open_checkpoint(saved / "file")
    next(iter(opened.tensors.values())).whole().zero_()
    check_same(whole(opened.weights), whole(open_checkpoint(saved / "file").weights))


def test_put_together_and_taken_apart() -> None:
    a, b = torch.randn(4, 3), torch.randn(5, 3)
    joined = Stored.of_rows([(Stored.of(a), 1, 3), (Stored.of(b), 0, 5), (Stored.of(a), 3, 4)])
    right = torch.cat([a[1:3], b, a[3:]])
    assert joined.shape == right.shape and torch.equal(joined.whole(), right)
    for start in range(8):
        for stop in range(start, 9):
            assert torch.equal(joined.read(start, stop), right[start:stop])
    row = Stored.of(a).row(2)
    assert row.shape == (3,) and torch.equal(row.read(1, 3), a[2, 1:])
    assert torch.equal(row.as_row().whole(), a[2:3])
    number = Stored.of(a[0]).row(1)
    assert number.shape == () and torch.equal(number.whole(), a[0, 1])
    for shape in ((), (2,), (2, 3)):
        assert torch.equal(Stored.zeros(torch.Size(shape), torch.int32).whole(), torch.zeros(shape, dtype=torch.int32))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 5),
        torch.randn(5, 6).t(),
        torch.randn(4, 3, 2, dtype=torch.float64).transpose(0, 2),
        torch.randn(3, 4).bfloat16(),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(4) > 1,
    ],
    ids=lambda tensor: f"{list(tensor.shape)} {tensor.dtype} {tensor.is_contiguous()}",
)
def test_any_tensor_that_dcp_writes(tmp_path: Path, tensor: Tensor) -> None:
    dcp.save({"before": torch.ones(3).bool(), "tensor": tensor}, checkpoint_id=tmp_path, no_dist=True)
    metadata = FileSystemReader(tmp_path).read_metadata()
    items = {
        index.fqn: Item(tmp_path / info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }
    found = torch.empty_like(tensor)
    items["tensor"].read_into(found, 0)
    assert torch.equal(found, tensor)
    if tensor.ndim and len(tensor) > 2:
        found = torch.empty(2, *tensor.shape[1:], dtype=tensor.dtype)
        items["tensor"].read_into(found, 1)
        assert torch.equal(found, tensor[1:3])


def test_where_torch_keeps_the_data() -> None:
    """What torch notes while it loads without data, which is private (torch 2.13)."""
    file = io.BytesIO()
    torch.save({"a": torch.arange(10.0)[3:], "b": torch.arange(4)}, file)
    file.seek(0)
    loaded = load_without_data(file)
    for name, right in {"a": torch.arange(10.0)[3:], "b": torch.arange(4)}.items():
        at = data_offset(loaded[name])
        assert file.getvalue()[at : at + right.nbytes] == right.numpy().tobytes()


def test_the_name_that_lightning_gives() -> None:
    assert stored.META == _METADATA_FILENAME


def _broken(saved: Path, target: Path, what: str) -> Path:
    source = saved / ("file" if what in ("cut file", "text") else "folder")
    if source.is_file():
        data = source.read_bytes()
        target.write_bytes(data[: len(data) // 2] if what == "cut file" else b"text")
        return target
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    shard = target / "__1_0.distcp"
    if what == "cut shard":
        shard.write_bytes(shard.read_bytes()[:-5000])
    elif what == "all":
        for file in list(target.iterdir()):
            file.unlink()
    elif what != "nothing":
        (shard if what == "shard" else target / what).unlink()
    return target


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("shard", DamagedError, "is not complete: __1_0.distcp is missing"),
        ("cut shard", DamagedError, r"is not complete: __1_0.distcp has [\d,]+ bytes of [\d,]+"),
        (".metadata", DamagedError, "is not complete: .metadata is missing"),
        ("meta.pt", DamagedError, "is not complete: meta.pt is missing"),
        ("all", NotACheckpointError, "is not a Trainer's checkpoint: a folder without meta.pt and .metadata"),
        ("cut file", DamagedError, "is cut off or damaged"),
        ("text", NotACheckpointError, "is not a file that torch.save wrote"),
    ],
)
def test_what_is_broken(saved: Path, tmp_path: Path, what: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        open_checkpoint(_broken(saved, tmp_path / "c.ckpt", what))


@pytest.mark.parametrize("form", ["folder", "file"])
def test_what_is_not_plain(saved: Path, tmp_path: Path, form: str) -> None:
    target = _broken(saved, tmp_path / "c.ckpt", "nothing") if form == "folder" else tmp_path / "c.ckpt"
    meta = saved / "folder" / "meta.pt" if form == "folder" else saved / "file"
    held = {**torch.load(meta, weights_only=True), "hyper_parameters": {"loss": torch.nn.MSELoss()}}
    torch.save(held, target / "meta.pt" if form == "folder" else target)
    words = r"holds more than plain values: .*torch.nn.modules.loss.MSELoss.*; .*torch.serialization.add_safe_globals"
    with pytest.raises(ValueError, match=words):
        open_checkpoint(target)
    assert "loss" in open_checkpoint(target, weights_only=False).rest["hyper_parameters"]


def test_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the checkpoint .*nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    torch.save({"weight": torch.ones(2)}, tmp_path / "w")
    with pytest.raises(NotACheckpointError, match=r"it has no state_dict, but \['weight'\]"):
        open_checkpoint(tmp_path / "w")
    torch.save([1], tmp_path / "l")
    with pytest.raises(NotACheckpointError, match="it has no state_dict, but list"):
        open_checkpoint(tmp_path / "l")
