"""Ranks whose data is not alike, under real Trainers: who stops when, what is told, what predict gives."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_moe_ep import MoEEPStrategy, split_by_rank
from lightning_moe_ep.data import Host
from tests.contract import contract
from tests.models import loss_of, make_batch
from tests.oracle import answer
from tests.parity import Case, CaseModule, Probe, trainer, worst
from tests.pool import RankPool


def row(number: int) -> dict[str, Any]:
    return {"id": number, **make_batch("own", 1, seed=number)}


class Stream(IterableDataset[dict[str, Any]]):
    """Rows with these numbers; one that is negative raises an error."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in self.numbers:
            if number < 0:
                raise OSError(f"no row {number}")
            yield row(number)


class Sized(Stream):
    """A stream that promises more than it has."""

    def __len__(self) -> int:
        return len(self.numbers) + 4


def of_rank(*numbers: list[int], kind: Any = list, batch_size: int = 1, **options: Any) -> DataLoader:
    """A loader with this rank's rows; `kind` makes a dataset of their numbers."""
    mine = numbers[dist.get_rank()]
    data = [row(number) for number in mine] if kind is list else kind(mine)
    return DataLoader(data, batch_size=batch_size, **options)


class Seen(CaseModule):
    """Keeps the numbers of the rows that each step sees."""

    def __init__(self) -> None:
        super().__init__(Case())
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "test": [], "predict": []}
        self.started: list[int] = []

    def note(self, stage: str, batch: dict[str, Any]) -> list[int]:
        numbers = batch.pop("id").tolist()  # so that a batch that is used twice fails
        self.seen[stage] += numbers
        return numbers

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.note("train", batch)
        return loss_of(self.model, batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("val", batch)
        self.log("val_loss", loss_of(self.model, batch), sync_dist=True)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.note("test", batch)
        self.log("test_loss", loss_of(self.model, batch), sync_dist=True)

    def on_predict_start(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.started.append(batch_idx)

    def predict_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> dict[int, Tensor]:
        assert not self.training
        numbers = self.note("predict", batch)
        outputs = dict(zip(numbers, self.model(batch["x"]).flatten(1), strict=True))
        self.rows.update(outputs)
        return outputs


def told(run: Callable[[], Any]) -> list[str]:
    """What is warned of the ranks' loaders while `run`, and the error if there is one."""
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "_dataloader" in text and "rank" in text] + errors


def quiet(uneven: Any = "stop", **options: Any) -> L.Trainer:
    return trainer(MoEEPStrategy(uneven=uneven), **{"max_epochs": 1, **options})


# Training, validation, test.


class Messages:
    """Counts the messages between ranks."""

    def __enter__(self) -> list[int]:
        self.sizes: list[int] = []
        self.sum = Host.sum
        counted = lambda host, numbers: (self.sizes.append(len(numbers)), self.sum(host, numbers))[1]  # noqa: E731
        Host.sum = counted  # type: ignore[method-assign]
        return self.sizes

    def __exit__(self, *args: Any) -> None:
        Host.sum = self.sum  # type: ignore[method-assign]


def _unequal() -> dict[str, Any]:
    """Rank 0 has more than rank 1, in each loop."""
    found: dict[str, Any] = {}
    L.seed_everything(7, verbose=False)
    module = Seen()
    fitting = quiet(num_sanity_val_steps=1, accumulate_grad_batches=2)
    train = of_rank([0, 1, 2, 3, 4], [10, 11, 12], kind=Stream)
    val = of_rank([20, 21, 22], [30, 31], kind=Stream)
    with Messages() as found["messages"]:
        found["fit"] = told(lambda: fitting.fit(module, train, val))
    found["steps"] = fitting.global_step
    with Messages() as found["messages of known lengths"]:
        found["test"] = told(lambda: fitting.test(module, of_rank([40, 41, 42], [50, 51]), verbose=False))
    with Messages() as found["messages of equal lengths"]:
        found["equal"] = told(lambda: fitting.test(module, of_rank([40, 41], [50, 51]), verbose=False))
    found["seen"] = {stage: list(numbers) for stage, numbers in module.seen.items()}
    found["the same stream"] = told(lambda: fitting.test(module, DataLoader(Stream([60, 61])), verbose=False))
    return found


@contract("Data", "Ranks with unequal numbers of batches", "all stop with the first that has no more (`uneven='stop'`)")
@contract("Data", "Iterable datasets", "works; split them with `split_by_rank`")
@contract("Data", "Validation and test on unequal numbers of batches", "all ranks stop with the first")
def test_ranks_stop_together(ranks: RankPool) -> None:
    first, second = ranks.run(_unequal, world=2)
    assert first["seen"] == {
        "train": [0, 1, 2],
        "val": [20, 20, 21],
        "test": [40, 41, 40, 41],
        "predict": [],
    }
    assert second["seen"]["train"] == [10, 11, 12] and second["seen"]["val"] == [30, 30, 31]
    assert first["steps"] == 2, "the window of two that the end cuts to one is a step as well"
    assert first["fit"] == [
        f"the {name}_dataloaders have unequal numbers of batches: rank 1 ran out after {number}, where rank 0 had at"
        " least 1 more; all ranks stop there, and those are dropped"
        for name, number in (("train", 3), ("val", 2))
    ]
    # In training one a window of two: whether it failed, which batches the rank has, and their tokens.
    assert first["messages"] == [3, 5, 5, 3, 3, 3] and first["messages of known lengths"] == [3, 3]
    assert first["test"] == [
        "the test_dataloaders have unequal numbers of batches: rank 1 ran out after 2, where rank 0 had 1 more; all"
        " ranks stop there, and those are dropped"
    ]
    assert not first["equal"] and not first["messages of equal lengths"]
    assert not second["fit"] and not second["test"], "warnings are rank 0's"
    assert first["the same stream"] == [
        "the test_dataloaders of ranks 0, 1 begin with the same batch. Lightning does not split streams, nor what has a"
        " sampler of its own, by rank: use `split_by_rank(dataset, **self.trainer.distributed_sampler_kwargs)`, or all"
        " ranks compute the same"
    ]


def _errors() -> dict[str, list[str]]:
    """What is told on this rank, by case."""
    module = Seen()
    cases: dict[str, Callable[[], Any]] = {
        "unequal streams": lambda: quiet("error").fit(module, of_rank([0, 1], [10], kind=Stream)),
        "unequal lists": lambda: quiet("error").test(module, of_rank([0, 1], [10])),
        "no batch": lambda: quiet().fit(module, of_rank([0, 1], [])),
        "no batch of a stream": lambda: quiet().fit(module, of_rank([0, 1], [], kind=Stream)),
        "a loader that fails": lambda: quiet().fit(module, of_rank([0, 1], [10, -1], kind=Stream)),
        "a loader that cannot begin": lambda: quiet().validate(
            module, Unstartable() if dist.get_rank() else of_rank([0])
        ),
        "tokens of what is no mapping": lambda: quiet().fit(Counts(), of_rank([0], [1], kind=Pairs)),
        "no loss by hand": lambda: quiet().fit(ByHand(), of_rank([0], [10])),
        "no loss": lambda: quiet().fit(NoLoss(), of_rank([0], [10])),
        "a loader that fails in predict": lambda: quiet().predict(module, of_rank([0, 1], [-1], kind=Stream)),
        "a batch sampler that hides": lambda: quiet(use_distributed_sampler=True).predict(
            module, DataLoader([row(0), row(1)], batch_sampler=Hiding(range(2), 1, False))
        ),
        "predict_step with an iterator": lambda: quiet().predict(TakesIterator(), of_rank([0, 1], [10])),
    }
    return {case: told(run) for case, run in cases.items()}


class Unstartable:
    """Can be begun once, which is when the Trainer looks whether it is a loader."""

    begun = False

    def __iter__(self) -> Iterator[Any]:
        if self.begun:
            raise OSError("no such disk")
        self.begun = True
        return iter(())


class Pairs(Stream):
    """Gives what is no mapping, on rank 0."""

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield item if dist.get_rank() else tuple(item.values())


class Counts(Seen):
    def count_tokens(self, batch: dict[str, Any]) -> int:
        return len(batch["x"])


class NoLoss(Seen):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return {"loss": None}


class ByHand(Seen):
    """Steps by itself, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class TakesIterator(Seen):
    def predict_step(self, dataloader_iter: Iterator[Any]) -> None:
        raise AssertionError("not called")


@contract("Data", "Ranks with unequal numbers of batches and `uneven='error'`", "refused: give each rank equally many")
@contract("Data", "A loader that fails on one rank", "refused: all ranks raise, and name the rank and its error")
@contract("Data", "`training_step` returning None", "refused on several devices: return a loss that is zero")
def test_what_goes_wrong_on_one_rank_is_told_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(_errors, world=2)
    unequal = (
        "ValueError: the {}_dataloaders have unequal numbers of batches: rank 1 ran out after {}, where rank 0 had {}"
    )
    equally = "give each rank equally many, or use uneven='stop' to drop those"
    same = {
        "unequal streams": f"{unequal.format('train', 1, 'at least 1 more')}; {equally}",
        "unequal lists": f"{unequal.format('test', 1, '1 more')}; {equally}",
        "no batch": f"{unequal.format('train', 0, '2 more')}; give each rank one at least",
        "no batch of a stream": f"{unequal.format('train', 0, 'at least 1 more')}; give each rank one at least",
        "a batch sampler that hides": "ValueError: the batch sampler Hiding of the predict_dataloader does not keep the"
        " sampler that it is made with, so its samples cannot be dealt out to ranks; keep it as self.sampler, or set"
        " Trainer(use_distributed_sampler=False) and deal them out yourself",
        "predict_step with an iterator": "ValueError: a predict_step that takes dataloader_iter needs the same known"
        " number of batches on every rank, and cp=1, as a rank that has no more has to repeat its last batch; let"
        " predict_step take the batch",
    }
    for case, text in same.items():
        assert first.pop(case) == second.pop(case) == [text], case
    for rank, texts in enumerate((first, second)):
        (text,) = texts.pop("no loss")
        assert text == (
            f"RuntimeError: training_step returned no loss on rank {rank}, but all 2 ranks have to run backward"
            " together; to leave a batch out, return a loss that is zero and connected to the graph, such as `loss * 0`"
        )
    assert first.pop("no loss by hand") == second.pop("no loss by hand") == []
    (text,) = first.pop("tokens of what is no mapping")
    assert text.startswith("TypeError: the training loader yielded a list; batches must be mappings")
    ended = "RuntimeError: the {}_dataloader of rank {} failed, so this rank ends as well: {}"
    assert second.pop("tokens of what is no mapping") == [ended.format("train", 0, text)]
    failing = {
        "a loader that fails": ("train", "OSError: no row -1"),
        "a loader that cannot begin": ("val", "OSError: no such disk"),
        "a loader that fails in predict": ("predict", "OSError: no row -1"),
    }
    for case, (stage, text) in failing.items():
        assert second.pop(case) == [text] and first.pop(case) == [ended.format(stage, 1, text)], case
    assert not first and not second


def _no_loss_alone() -> list[str]:
    module = Seen()
    module.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    return told(lambda: quiet().fit(module, of_rank([0])))


def test_no_loss_on_one_device_is_lightnings(ranks: RankPool) -> None:
    assert ranks.run(_no_loss_alone, world=1) == [[]]


def test_what_uneven_may_be() -> None:
    with pytest.raises(ValueError, match=r"uneven='skip' is not known; use one of \['stop', 'error'\]"):
        MoEEPStrategy(uneven="skip")  # type: ignore[arg-type]


class EndsInside(CaseModule):
    """Ends its first epoch inside an accumulation window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


def _ends_inside(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    L.seed_everything(7, verbose=False)
    probe = Probe()
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": [probe]}
    trainer(MoEEPStrategy(ep=case.ep), **options).fit(EndsInside(case))
    return probe.initial, probe.gradients[0]


@pytest.mark.parametrize("ep", [1, 2])
def test_what_an_open_window_has_accumulated_is_gone(ranks: RankPool, ep: int) -> None:
    case = Case(ep=ep, tokens=((16, 5), (7, 8)))
    initial, gradients = ranks.run(_ends_inside, case, world=2)[0]
    error, name = worst(gradients, answer(case.kind, case.model, initial, case.batches()).gradients[0])
    assert error < 1e-5, name


# Predict.


class Writer(BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[list[int], list[int]]] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        self.batches.append((list(prediction), list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epochs.append(indices)


def _predict() -> dict[str, Any]:
    """By case: predictions by the number of the row, in order, and what else the run saw."""
    L.seed_everything(7, verbose=False)
    multiprocessing.current_process()._config["daemon"] = False  # so that a loader may have workers
    module = Seen()
    rows = [row(number) for number in range(16)]

    def predict(*loaders: Any, **options: Any) -> dict[str, Any]:
        if hasattr(module, "model"):
            # As where nobody seeds: ranks draw unlike numbers.
            os.environ.pop("PL_GLOBAL_SEED", None)
            torch.manual_seed(dist.get_rank())
        module.started, writer = [], Writer()
        predicting = quiet(use_distributed_sampler=True, callbacks=[writer], **options)
        given = predicting.predict(module, list(loaders) if len(loaders) > 1 else loaders[0])
        of_loaders = given if len(loaders) > 1 else [given]
        return {
            "given": [[dict(batch) for batch in of_loader] for of_loader in of_loaders],
            "batches": writer.batches,
            "epochs": writer.epochs,
            "hooks": module.started,
        }

    combined = CombinedLoader([DataLoader(rows[:3])], "sequential")
    return {
        "a CombinedLoader": predict(combined),
        "a CombinedLoader again": predict(combined),
        "5 samples": predict(DataLoader(rows[:5], batch_size=1)),
        "7 samples, shuffled": predict(DataLoader(rows[:7], batch_size=2, shuffle=True)),
        "1 sample": predict(DataLoader(rows[:1])),
        "a worker": predict(DataLoader(rows[:3], num_workers=1)),
        "own batch sampler": predict(DataLoader(rows[:5], batch_sampler=Own(SequentialSampler(range(5)), 1, False))),
        "two loaders": predict(DataLoader(rows[:1]), DataLoader(rows[1:4])),
        "2 batches": predict(DataLoader(rows[:5]), limit_predict_batches=2),
        "a third": predict(DataLoader(rows[:5]), limit_predict_batches=0.34),
        "streams": predict(of_rank([0, 1, 2], [10], [], kind=Stream)),
        "one stream is empty": predict(of_rank([], [10, 11], kind=Stream), of_rank([3], [], kind=Stream)),
        "2 batches of streams": predict(of_rank([0, 1, 2], [10], kind=Stream), limit_predict_batches=2),
        "split stream": predict(
            DataLoader(split_by_rank(Stream(list(range(5))), rank=dist.get_rank(), num_replicas=2))
        ),
        "stream that promises more": predict(of_rank([0, 1, 2], [10], kind=Sized)),
    }


class Own(BatchSampler):
    """A user's own class, of which it is not known that its len() is right."""


class Hiding(BatchSampler):
    """Does not keep its sampler."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.batch_size, self.drop_last, self.batches = batch_size, drop_last, [[index] for index in sampler]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _one_process() -> dict[int, Tensor]:
    """What one process predicts for each row."""
    L.seed_everything(7, verbose=False)
    given = quiet().predict(Seen(), DataLoader([row(number) for number in range(16)], batch_size=16))
    return dict(given[0])


@contract("Data", "`predict` on samples that do not divide by ranks and batches", "works; each sample once, in order")
@contract("Data", "`limit_predict_batches`, several loaders in `predict`")
@contract("Callbacks", "`BasePredictionWriter`", "works; each sample once, with the right indices")
def test_predict_gives_each_sample_once(ranks: RankPool) -> None:
    found = ranks.run(_predict, world=2)
    (right,) = ranks.run(_one_process, world=1)
    order = {
        case: [[[list(batch) for batch in loader] for loader in rank[case]["given"]] for rank in found]
        for case in found[0]
    }
    shuffled = order.pop("7 samples, shuffled")
    numbers = [number for rank in shuffled for batch in rank[0] for number in batch]
    assert sorted(numbers) == list(range(7)) and numbers != [0, 2, 4, 6, 1, 3, 5]
    assert [[len(batch) for batch in rank[0]] for rank in shuffled] == [[2, 2], [2, 1]]
    assert order == {
        "a CombinedLoader": [[[[0], [2]]], [[[1]]]],
        "a CombinedLoader again": [[[[0], [2]]], [[[1]]]],
        "5 samples": [[[[0], [2], [4]]], [[[1], [3]]]],
        "1 sample": [[[[0]]], [[]]],
        "a worker": [[[[0], [2]]], [[[1]]]],
        "own batch sampler": [[[[0], [2], [4]]], [[[1], [3]]]],
        "two loaders": [[[[0]], [[1], [3]]], [[], [[2]]]],
        "2 batches": [[[[0], [2]]], [[[1], [3]]]],
        "a third": [[[[0]]], [[[1]]]],
        "streams": [[[[0], [1], [2]]], [[[10]]]],
        "one stream is empty": [[[], [[3]]], [[[10], [11]], []]],
        "2 batches of streams": [[[[0], [1]]], [[[10]]]],
        "split stream": [[[[0], [2], [4]]], [[[1], [3]]]],
        "stream that promises more": [[[[0], [1], [2]]], [[[10]]]],
    }
    for rank in found:
        for case, run in rank.items():
            for loader in run["given"]:
                for batch in loader:
                    for number, output in batch.items():
                        torch.testing.assert_close(output, right[number], rtol=1e-5, atol=1e-6)
            numbers = [list(batch) for loader in run["given"] for batch in loader]
            assert [written for written, _ in run["batches"]] == numbers, case
            assert len(run["hooks"]) == len(numbers), "hooks ran for a batch that was repeated"
            if "stream" not in case and "loaders" not in case:
                assert [indices for _, indices in run["batches"]] == numbers, case
                assert run["epochs"] == [[numbers]], case


# Flags of the Trainer.


class Several(Seen):
    """Trains on a batch, or on a dictionary of them; counts the times that its data is asked for."""

    def __init__(self, train: Callable[[], Any], val: Callable[[], Any]) -> None:
        super().__init__()
        self.train_data, self.val_data = train, val
        self.asked = 0
        self.batches: list[Any] = []

    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.train_data()

    def val_dataloader(self) -> Any:
        return self.val_data()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if "x" in batch:
            return super().training_step(batch, batch_idx)
        if isinstance(batch, list):
            return super().training_step(batch[0], batch_idx)
        self.batches.append([part["id"].item() for part in batch.values()])
        return sum(loss_of(self.model, part) for part in batch.values())


def _flags() -> dict[str, dict[str, Any]]:
    """By case: the rows that training and validation saw, the steps, and how often the data was asked for."""

    def rows(*numbers: int) -> DataLoader:
        return DataLoader([row(number) for number in numbers])

    def fit(train: Any = lambda: rows(*range(12)), val: Any = lambda: rows(*range(20, 24)), **options: Any) -> Any:
        L.seed_everything(7, verbose=False)
        module = Several(train, val)
        fitting = quiet(**{"use_distributed_sampler": True, "num_sanity_val_steps": 0, **options})
        fitting.fit(module)
        seen = {stage: numbers for stage, numbers in module.seen.items() if numbers}
        return {**seen, "steps": fitting.global_step, "asked": module.asked, "batches": module.batches}

    def two(mode: str) -> Any:
        loaders = {"a": of_rank([0, 1, 2, 3], [10, 11, 12], kind=Stream), "b": of_rank([4, 5], [14], kind=Stream)}
        return lambda: CombinedLoader(loaders, mode)

    combined = CombinedLoader([of_rank([0, 1], [10], kind=Stream)], "min_size")
    mine = [of_rank([20, 21], [30]), of_rank([22], [32, 33])]
    return {
        "plain": fit(),
        "limit_train_batches=2": fit(limit_train_batches=2, limit_val_batches=1),
        "limit_train_batches=0.5": fit(limit_train_batches=0.5, limit_val_batches=0.5),
        "val_check_interval=2": fit(val_check_interval=2),
        "val_check_interval=0.5": fit(val_check_interval=0.5),
        "fast_dev_run": fit(fast_dev_run=True),
        "num_sanity_val_steps=1": fit(num_sanity_val_steps=1, limit_train_batches=1),
        "overfit_batches=2": fit(overfit_batches=2, max_epochs=2),
        "use_distributed_sampler=False": fit(use_distributed_sampler=False),
        "reload_dataloaders_every_n_epochs=1": fit(reload_dataloaders_every_n_epochs=1, max_epochs=2),
        "several val loaders": fit(limit_train_batches=1, val=lambda: mine, use_distributed_sampler=False),
        "min_size": fit(two("min_size"), max_epochs=2),
        "max_size_cycle": fit(two("max_size_cycle")),
        "one CombinedLoader": fit(lambda: combined),
        "the same in another fit": fit(lambda: combined),
    }


@contract("Data", "Map-style datasets with Lightning's sampler")
@contract("Data", "`limit_train_batches`, `limit_val_batches`, as numbers and as shares")
@contract("Data", "`val_check_interval`, as a number and as a share")
@contract("Data", "`fast_dev_run`")
@contract("Data", "`num_sanity_val_steps`")
@contract("Data", "`overfit_batches`")
@contract("Data", "`use_distributed_sampler=False`")
@contract("Data", "`reload_dataloaders_every_n_epochs`")
@contract("Data", "Several validation loaders; a `CombinedLoader` in training", "works, also of unequal lengths")
def test_flags_of_the_trainer(ranks: RankPool) -> None:
    first, second = ranks.run(_flags, world=2)
    assert sorted(first["plain"]["train"] + second["plain"]["train"]) == list(range(12))
    assert first["plain"]["val"] == [20, 22] and second["plain"]["val"] == [21, 23] and first["plain"]["steps"] == 6
    for case, train, val in (
        ("limit_train_batches=2", 2, 1),
        ("limit_train_batches=0.5", 3, 1),
        ("val_check_interval=2", 6, 3 * 2),
        ("val_check_interval=0.5", 6, 2 * 2),
        ("fast_dev_run", 1, 1),
        ("num_sanity_val_steps=1", 1, 1 + 2),
        ("reload_dataloaders_every_n_epochs=1", 2 * 6, 2 * 2),
    ):
        for rank in (first, second):
            assert (len(rank[case]["train"]), rank[case]["steps"], len(rank[case]["val"])) == (train, train, val), case
    assert first["overfit_batches=2"]["train"] == [0, 2] * 2 and second["overfit_batches=2"]["train"] == [1, 3] * 2
    assert second["use_distributed_sampler=False"]["train"] == list(range(12))
    assert first["reload_dataloaders_every_n_epochs=1"]["asked"] == 2
    assert first["several val loaders"]["val"] == [20, 22] and second["several val loaders"]["val"] == [30, 32]
    assert first["min_size"]["batches"] == [[0, 4]] * 2 and second["min_size"]["batches"] == [[10, 14]] * 2
    for case in ("one CombinedLoader", "the same in another fit"):
        assert first[case]["train"] == [0] and second[case]["train"] == [10], case
    assert first["max_size_cycle"]["batches"] == [[0, 4], [1, 4], [2, 4]]
    assert second["max_size_cycle"]["batches"] == [[10, 14], [11, 14], [12, 14]]
