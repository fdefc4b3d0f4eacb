"""What ranks of a cp group are given: the same, wherever the data comes from; or all ranks raise the same error."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BatchEncoding

from lightning_moe_ep import MoEEPStrategy, TextDataModule, split_by_rank
from lightning_moe_ep.data.alike import digest_of, unlike
from lightning_moe_ep.strategy.choosing import _tokens
from tests.contract import REPOSITORY, contract
from tests.models import build
from tests.parity import Probe, trainer, worst
from tests.pool import RankPool
from tests.strategy.test_loading import told

ROWS, LENGTH = 8, 5
CP, WORLD = 2, 4


class Rows(Dataset[dict[str, Tensor]]):
    """Row i begins with i; with each comes a number that is drawn."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= ROWS:
            raise IndexError
        ids = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(index))
        ids[0] = index
        labels = ids.clone()
        labels[: index % 3] = -100
        return {"input_ids": ids, "labels": labels, "drawn": torch.rand(())}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(Rows()[index] for index in range(ROWS))


def of_the_page() -> type[L.LightningModule]:
    """The module that docs/long_sequences.md shows."""
    (code,) = re.findall(r"```python\n(import .*?)```", (REPOSITORY / "docs" / "long_sequences.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["MyModule"]


class Own(of_the_page()):  # type: ignore[misc]
    """Keeps what it is given."""

    def __init__(self, data: Callable[[L.Trainer], Any], *, by_transformers: bool = False) -> None:
        super().__init__()
        self.data = data
        self.by_transformers = by_transformers
        self.given: list[tuple[list[int], list[float]]] = []
        self.items: list[int] = []

    def configure_model(self) -> None:
        self.model = build("qwen3_moe", num_hidden_layers=1)

    def train_dataloader(self) -> Any:
        return self.data(self.trainer)

    val_dataloader = predict_dataloader = train_dataloader

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self._see(batch)
        items = batch["num_items_in_batch"]
        self.items.append(items)
        if not self.by_transformers:
            return super().training_step(batch, batch_idx)
        batch = self.trainer.strategy.shard_sequences(batch)
        factor = self.trainer.world_size * self.trainer.accumulate_grad_batches
        return self.model(**batch, labels=batch["shift_labels"]).loss * factor

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val", self._summed(batch), sync_dist=True, reduce_fx="sum")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[int]:
        self._summed(batch)
        strategy = self.trainer.strategy
        ids = strategy.shard_sequences(batch)["input_ids"]
        assert ids.shape[1] == -(-LENGTH // strategy.cp)
        whole = strategy.gather_sequences(ids, length=LENGTH)
        assert torch.equal(whole, batch["input_ids"])
        return whole[:, 0].tolist()

    def _see(self, batch: dict[str, Any]) -> None:
        self.given.append((batch["input_ids"][:, 0].tolist(), batch.pop("drawn").tolist()))

    def _summed(self, batch: dict[str, Any]) -> Tensor:
        self._see(batch)
        batch = self.trainer.strategy.shard_sequences(batch)
        targets = batch.pop("shift_labels")
        return F.cross_entropy(self.model(**batch).logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.batches.append((prediction, list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epochs.append((predictions, indices))


def rows(trainer: L.Trainer, **options: Any) -> DataLoader:
    return DataLoader(Rows(), **{"batch_size": 2, **options})


def stream(trainer: L.Trainer) -> DataLoader:
    return DataLoader(split_by_rank(Stream(), **trainer.distributed_sampler_kwargs), batch_size=2)


def fitting(cp: int = CP, **options: Any) -> L.Trainer:
    strategy = MoEEPStrategy(ep=1, cp=cp)
    return trainer(strategy, **{"max_epochs": 1, "use_distributed_sampler": True, "num_sanity_val_steps": 0, **options})


def _given() -> dict[str, Any]:
    """On a rank, by case: the numbers of the rows, and what was drawn for them."""
    multiprocessing.current_process()._config["daemon"] = False  # so that a loader may have workers
    found: dict[str, Any] = {}
    for name, data, workers in (
        ("sampler", rows, False),
        ("workers", lambda trainer: rows(trainer, num_workers=1, multiprocessing_context="fork"), True),
        ("stream", stream, False),
    ):
        L.seed_everything(7, workers=workers, verbose=False)
        module = Own(data)
        fitting(limit_val_batches=0).fit(module)
        found[name], found["items"] = module.given, module.items
    os.environ.pop("PL_SEED_WORKERS")
    for name, run in (("validate", "validate"), ("predict", "predict")):
        module, writer = Own(rows), Writer()
        result = getattr(fitting(callbacks=[writer]), run)(module)
        found[name] = module.given
    found["predictions"], found["written"], found["epochs"] = result, writer.batches, writer.epochs
    for number in (5, 1):  # of which one group has more, or all
        few = [Rows()[index] for index in range(number)]
        found[number] = fitting().predict(Own(lambda trainer, few=few: DataLoader(few)))
    found["uneven"] = told(lambda: fitting(use_distributed_sampler=False).validate(Own(uneven), verbose=False))
    return found


def uneven(trainer: L.Trainer) -> DataLoader:
    """The first group has three rows, the second two."""
    return DataLoader([Rows()[index] for index in ((0, 1, 2), (3, 4))[trainer.global_rank // CP]])


@contract("Data", "Samplers, `predict` and `BasePredictionWriter` at cp > 1", "works; a cp group counts as one rank")
@contract("Data", "Workers' seeds at cp > 1", "works; a cp group's are the same (`seed_everything(n, workers=True)`)")
def test_ranks_of_a_group_are_given_the_same(ranks: RankPool) -> None:
    of_ranks = ranks.run(_given, world=WORLD)
    for case in ("sampler", "workers", "stream", "validate", "predict"):
        given = [found[case] for found in of_ranks]
        assert given[0] == given[1] and given[2] == given[3], case
        numbers = [number for rank in (0, 2) for batch, _ in given[rank] for number in batch]
        assert sorted(numbers) == list(range(ROWS)), case
    drawn = [[value for _, values in found["workers"] for value in values] for found in of_ranks]
    assert not set(drawn[0]) & set(drawn[2]), "workers of unlike groups drew the same"
    labels = [int((Rows()[i]["labels"][1:] != -100).sum()) for i in range(ROWS)]
    first, second = (found["stream"] for found in of_ranks[::2])
    of_steps = [sum(labels[n] for n in [*a, *b]) for (a, _), (b, _) in zip(first, second, strict=True)]
    assert all(found["items"] == of_steps for found in of_ranks), "tokens that count more or less than once"

    assert [found["predictions"] for found in of_ranks] == [[[0, 2], [4, 6]], [], [[1, 3], [5, 7]], []]
    for found in of_ranks:
        assert found["written"] == [(numbers, numbers) for numbers in found["predictions"]]
        assert [predictions for predictions, _ in found["epochs"]] == [found["predictions"]]
    assert [found[5] for found in of_ranks] == [[[0], [2], [4]], [], [[1], [3]], []]
    assert [found[1] for found in of_ranks] == [[[0]], [], [], []]
    assert of_ranks[0]["uneven"] == [
        "the val_dataloaders have unequal numbers of batches: ranks 2, 3 ran out after 2, where ranks 0, 1 had 1 more;"
        " all ranks stop there, and those are dropped"
    ]


def _unlike() -> dict[str, list[str]]:
    """On a rank, by case: what is told of the ranks' loaders, and the error if there is one."""

    def of_rank(kind: type, *numbers: list[int]) -> Callable[[L.Trainer], DataLoader]:
        mine = [Rows()[number] for number in numbers[dist.get_rank()]]
        for row in mine:
            row["drawn"] = torch.zeros(())
        return lambda trainer: DataLoader(kind(mine))

    def seeded_apart(trainer: L.Trainer) -> DataLoader:
        torch.manual_seed(dist.get_rank())
        return rows(trainer)

    by_rank = lambda trainer: DataLoader(  # noqa: E731
        split_by_rank(Stream(), rank=trainer.global_rank, num_replicas=trainer.world_size)
    )
    cases = {
        "split by rank": ("fit", by_rank),
        "crossed": ("validate", of_rank(list, [0], [1], [1], [0])),
        "one is shorter": ("fit", of_rank(Given, [0, 1], [0, 1], [2, 3], [2])),
        "predict": ("predict", of_rank(Given, [0], [0], [1], [])),
        "drawn": ("fit", seeded_apart),
        "not split": ("validate", of_rank(Given, [0], [0], [0], [0])),
    }
    found = {}
    for name, (run, data) in cases.items():
        L.seed_everything(7, verbose=False)
        of_trainer = getattr(fitting(use_distributed_sampler=name != "crossed"), run)
        found[name] = told(partial(of_trainer, Own(data)))
    return found


class Given(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


@contract(
    "Data", "Unlike batches on ranks of a cp group", "refused: all ranks raise, with the call that deals data out"
)
def test_unlike_batches_are_an_error_on_all_ranks(ranks: RankPool) -> None:
    of_ranks = ranks.run(_unlike, world=WORLD)
    same = {"split by rank": ("train", "0, 1"), "crossed": ("val", "0, 1"), "drawn": ("train", "0, 1")}
    same |= {"one is shorter": ("train", "2, 3"), "predict": ("predict", "2, 3")}
    for case, (loader, group) in same.items():
        for found in of_ranks:
            (text,) = found.pop(case)
            assert text == (
                f"ValueError: the {loader}_dataloaders of ranks {group} gave them different batches, but these ranks"
                " are one cp group (cp=2): each computes a slice of the same sequences. Lightning's sampler deals"
                " map-style datasets out accordingly; split a stream with `split_by_rank(dataset,"
                " **self.trainer.distributed_sampler_kwargs)`, give a sampler of your own these arguments, and have"
                " what is drawn at random in the data drawn alike: seed_everything(seed, workers=True)"
            ), case
    (text,) = of_ranks[0].pop("not split")
    assert text.startswith("the val_dataloaders of ranks 0, 2 begin with the same batch. Lightning does not split")
    assert not any(text for found in of_ranks for texts in found.values() for text in texts)


def test_what_tells_batches_apart() -> None:
    ids = torch.arange(6).view(2, 3)
    batches = [{"input_ids": ids}, BatchEncoding({"input_ids": ids}), [ids.float()], ids.view(3, 2), ids + 1, "text", 3]
    batches.append(torch.ones(3, dtype=torch.complex64).conj())
    digests = [digest_of([batch], waits=False) for batch in batches]
    assert len(set(digests)) == len(batches) and 0 not in digests
    assert digests[1] == digest_of([BatchEncoding({"input_ids": ids.clone()})], waits=False)
    # What is wrong in two groups does not add up to nothing.
    of_ranks = [unlike(SimpleNamespace(rank=r, cp=2), [batches[i]])[0] for r, i in enumerate((0, 4, 4, 0))]
    assert sum(of_ranks) != 0
    assert sum(unlike(SimpleNamespace(rank=r, cp=4), [ids + r // 4])[0] for r in range(8)) == 0
    assert unlike(SimpleNamespace(rank=1, cp=1), [ids]) == []


def _own(cp: int, by_transformers: bool) -> tuple[dict[str, Tensor], float, float]:
    L.seed_everything(7, verbose=False)
    probe = Probe()
    options = {"batch_size": ROWS * cp // dist.get_world_size() // 2}
    fitted = fitting(cp, callbacks=[probe], accumulate_grad_batches=2)
    fitted.fit(Own(lambda trainer: rows(trainer, **options), by_transformers=by_transformers))
    return probe.gradients[0], probe.norms[0], float(fitted.callback_metrics["val"])


@pytest.mark.parametrize("by_transformers", [False, True])
def test_a_module_of_ones_own(ranks: RankPool, by_transformers: bool) -> None:
    ((gradients, norm, val),) = ranks.run(_own, 1, False, world=1)
    for mine, my_norm, my_val in ranks.run(_own, 2, by_transformers, world=2):
        error, name = worst(mine, gradients)
        assert error < 1e-5, f"the gradient of {name} is off by {error:.1e}"
        assert my_norm == pytest.approx(norm, rel=1e-6) and my_val == pytest.approx(val, rel=1e-6)


def test_text_is_enough_for_groups_that_would_be_too_little_for_ranks(tmp_path: Any) -> None:
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text("abcdefgh" * 4)
    data = TextDataModule(
        paths=[str(tmp_path / "text")], cache_dir=str(tmp_path / "cache"), block_size=16, val_fraction=0.3
    )
    data.prepare_data()
    data.setup()
    blocks = len(data.train_dataset)
    data.batch_size = blocks // 2
    # What ep="auto" reckons with.
    assert [_tokens(SimpleNamespace(trainer=SimpleNamespace(datamodule=data)), cp) for cp in (1, 3)] == [
        16 * data.batch_size,
        6 * data.batch_size,
    ]
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0}, world_size=4)
    data.train_dataloader()
    data.trainer.distributed_sampler_kwargs["num_replicas"] = 4
    with pytest.raises(ValueError, match=r"on each of 4 ranks \(or cp groups of ranks\); give more text"):
        data.train_dataloader()
