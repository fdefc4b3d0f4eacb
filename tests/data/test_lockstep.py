"""Loaders that end on all ranks at once: alone, between a Strategy and Lightning's training loop, and on real ranks."""

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_moe_ep.data.host import Host
from lightning_moe_ep.data.lockstep import Lengths, LockstepLoader, in_lockstep


def _tokens(batch: Mapping[str, Any]) -> int:
    return int(batch["n"])


class _Twin(Host):
    """Two ranks that have the same."""

    def __init__(self) -> None:
        self.rank, self.size, self.cp = 0, 2, 1
        self.messages: list[list[int]] = []

    def sum(self, numbers: Sequence[int]) -> list[int]:
        self.messages.append([int(number) for number in numbers])
        return [2 * number for number in numbers]

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


class _Shorter(_Twin):
    """The other rank has one batch, of 500 tokens, in each window."""

    def sum(self, numbers: Sequence[int]) -> list[int]:
        size = len(numbers) // 2
        other = [0, 1, *[0] * (size - 1), 500, *[0] * (size - 1)]
        return [mine + theirs for mine, theirs in zip(numbers, other, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        return [value, 1]


def _three(given: int = 0) -> int:
    return 3


def _windowed(loader: Iterable[Any], length: int | None = None, **options: Any) -> LockstepLoader:
    defaults = {"host": _Twin(), "count": _tokens, "window": _three, "name": "train_dataloader"}
    return LockstepLoader(loader, length=length, **{**defaults, **options})


def _marks(batches: Iterable[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    return [(int(b["n"]), b["num_items_in_batch"], b["num_micro_batches"]) for b in batches]


class _Numbers(Dataset[dict[str, Tensor]]):
    """Row i holds `n` = 10 to the power i, so that a sum tells what it was made of."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.length:
            raise IndexError
        return {"n": torch.tensor(10**index), "x": torch.ones(2)}


class _Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(_Numbers(7)[i] for i in range(7))


class _Positioned:
    """A loader that keeps its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.position < 4:
            self.position += 1
            yield {"n": self.position}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


SEVEN = [
    *[(10**i, 222, 3) for i in (0, 1, 2)],
    *[(10**i, 222_000, 3) for i in (3, 4, 5)],
    (10**6, 2_000_000, 1),
]


@pytest.mark.parametrize("data", [_Numbers(7), _Stream()])
def test_each_batch_knows_its_window(data: Dataset[dict[str, Tensor]]) -> None:
    loader = _windowed(DataLoader(data, batch_size=1))
    for _ in range(2):
        batches = list(loader)
        assert _marks(batches) == SEVEN
        assert all(type(b["num_items_in_batch"]) is int and type(b["num_micro_batches"]) is int for b in batches)


def test_one_message_a_window_and_no_batch_is_changed() -> None:
    batches: list[dict[str, Any]] = [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]
    sizes, host = iter([1, 2, 5]), _Twin()
    loader = _windowed(batches, 4, host=host, window=lambda given: next(sizes))
    assert _marks(loader) == [(1, 2, 1), (2, 10, 2), (3, 10, 2), (4, 8, 1)]
    assert host.messages == [[0, 1, 1], [0, 1, 1, 2, 3], [0, 1, 4]], "failed, which batches it has, their tokens"
    assert batches[0] == {"n": 1}


def test_tokens_of_batches_that_are_dropped_do_not_count() -> None:
    with pytest.warns(UserWarning, match="rank 1 ran out after 1, where rank 0 had at least 2 more"):
        assert _marks(_windowed(DataLoader(_Stream()), host=_Shorter())) == [(1, 501, 1)]


def test_length_is_what_ranks_agreed_on() -> None:
    loader = _windowed(DataLoader(_Numbers(7), batch_size=1), 4)
    assert len(loader) == 4 and len(list(loader)) == 4
    with pytest.raises(TypeError, match="the number of batches of the train_dataloader is not known"):
        len(_windowed(DataLoader(_Stream())))


def test_a_window_that_an_early_end_cuts_short_is_left_out() -> None:
    with pytest.warns(UserWarning, match="the train_dataloader ended") as told:
        assert _marks(_windowed(DataLoader(_Stream()), 9)) == SEVEN[:6]
    (text,) = [str(warning.message) for warning in told if "train_dataloader" in str(warning.message)]
    assert text == (
        "the train_dataloader ended after 7 batches, and not after 9 as its len() says; the last 1 do not fill an"
        " optimizer step and are left out"
    )


def test_refuses_batches_that_cannot_carry_the_count() -> None:
    with pytest.raises(TypeError, match="the training loader yielded a tuple; batches must be mappings"):
        next(iter(_windowed([(1, 2)])))


def test_refuses_an_empty_window() -> None:
    with pytest.raises(ValueError, match=r"window\(\) returned 0"):
        next(iter(_windowed([{"n": 1}], window=lambda given: 0)))


def test_attributes_are_those_of_the_loader() -> None:
    inner = DataLoader(_Numbers(7), sampler=DistributedSampler(_Numbers(7), num_replicas=2, rank=0))
    loader = _windowed(inner)
    _set_sampler_epoch(loader, 5)
    assert inner.sampler.epoch == 5  # type: ignore[attr-defined]
    assert loader.dataset is inner.dataset
    assert loader.batch_sampler is inner.batch_sampler
    loader.worker_init_fn = _three
    assert inner.worker_init_fn is _three
    with pytest.raises(AttributeError, match="no attribute 'flavour'"):
        _ = loader.flavour


def test_survives_pickling() -> None:
    loader = pickle.loads(pickle.dumps(_windowed(DataLoader(_Numbers(7)))))
    assert _marks(loader) == SEVEN
    # What unpickling asks of an instance that is still empty.
    assert not hasattr(LockstepLoader.__new__(LockstepLoader), "sampler")


def test_the_seed_is_drawn_where_it_is_without_the_window() -> None:
    def draws(wrap: bool) -> tuple[Tensor, list[int]]:
        torch.manual_seed(3)
        inner = DataLoader(_Numbers(7), shuffle=True)
        iterator: Iterator[Any] = iter(_windowed(inner) if wrap else inner)
        return torch.rand(1), [int(batch["n"]) for batch in iterator]

    assert draws(True) == draws(False)


def test_only_loaders_with_a_position_seem_to_keep_one() -> None:
    assert not isinstance(_windowed(DataLoader(_Numbers(7))), _Stateful)
    loader = _windowed(_Positioned())
    assert isinstance(loader, _Stateful)
    list(loader)
    assert loader.state_dict() == {"position": 4}


class _WindowedStrategy(SingleDeviceStrategy):
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        length = None if isinstance(dataloader.dataset, _Stream) else len(dataloader)  # type: ignore[attr-defined]
        lengths = Lengths([length, length], exact=length is not None)
        return in_lockstep(dataloader, lengths, trainer, host=_Twin(), name="train_dataloader", uneven="stop")


class _Linear(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[tuple[int, int, int]] = []
        self.windows: list[list[tuple[int, int, int]]] = []
        self.validated: list[set[str]] = []
        self.count_tokens = _tokens

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen += _marks([batch])
        return self.layer(batch["x"]).sum()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(set(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.windows.append(self.seen)
        self.seen = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(loader: DataLoader[dict[str, Tensor]], folder: Path, ckpt_path: Path | None = None, **options: Any) -> _Linear:
    module = _Linear()
    trainer = L.Trainer(
        strategy=_WindowedStrategy(torch.device("cpu")),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accumulate_grad_batches": 3, "enable_checkpointing": False, "max_epochs": 2, **options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about too few workers, and about restarting inside an epoch
        trainer.fit(module, loader, DataLoader(_Numbers(2)), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("data", [_Numbers(7), _Stream()])
def test_windows_are_the_optimizer_steps_of_the_trainer(data: Dataset[dict[str, Tensor]], tmp_path: Path) -> None:
    module = _fit(DataLoader(data), tmp_path)
    assert module.windows == [SEVEN[:3], SEVEN[3:6], SEVEN[6:]] * 2
    assert module.validated[-1] == {"n", "x"}


@pytest.mark.parametrize("data", [_Numbers(7), _Stream()])
def test_a_limited_epoch_cuts_its_last_window(data: Dataset[dict[str, Tensor]], tmp_path: Path) -> None:
    module = _fit(DataLoader(data), tmp_path, limit_train_batches=5)
    assert module.windows == [SEVEN[:3], [(10**3, 22_000, 2), (10**4, 22_000, 2)]] * 2


def test_a_restart_inside_an_epoch_cuts_its_last_window(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    _fit(DataLoader(_Numbers(7)), tmp_path, callbacks=[keep], enable_checkpointing=True, max_epochs=1)
    module = _fit(DataLoader(_Numbers(7)), tmp_path, tmp_path / "step=1.ckpt", max_epochs=1)
    # A DataLoader keeps no position: Lightning takes the 4 batches that are left from its beginning.
    assert module.windows == [SEVEN[:3], [(10**3, 2_000, 1)]]


def test_a_restart_with_another_window_steps_where_the_trainer_does(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"callbacks": [keep], "enable_checkpointing": True, "accumulate_grad_batches": 2}
    _fit(DataLoader(_Numbers(7)), tmp_path, max_epochs=1, **options)
    module = _fit(DataLoader(_Numbers(7)), tmp_path, tmp_path / "step=1.ckpt", max_epochs=1)
    # Two of the seven batches are behind it, and Lightning steps at the third, the sixth and the last.
    assert module.windows == [[(1, 2, 1)], [(10**n, 2_220, 3) for n in (1, 2, 3)], [(10**4, 20_000, 1)]]


class _SaveAfter(L.Callback):
    def __init__(self, batch_idx: int, path: Path) -> None:
        self.batch_idx, self.path = batch_idx, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch_idx:
            trainer.save_checkpoint(self.path)


def test_a_stream_restarted_inside_a_window_steps_where_the_trainer_does(tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    _fit(DataLoader(_Stream()), tmp_path, callbacks=[_SaveAfter(3, path)], max_epochs=1)
    module = _fit(DataLoader(_Stream()), tmp_path, path)
    # Four batches are behind it, and the stream begins anew.
    rest = [[(10**n, 22_200, 3) for n in (2, 3, 4)], [(10**n, 2_200_000, 2) for n in (5, 6)]]
    assert module.windows == [[(1, 22, 2), (10, 22, 2)], *rest, SEVEN[:3], SEVEN[3:6], SEVEN[6:]]


def test_persistent_workers_outlive_a_fit(tmp_path: Path) -> None:
    loader = DataLoader(_Numbers(7), num_workers=1, persistent_workers=True)
    first = _fit(loader, tmp_path, max_epochs=1)
    second = _fit(loader, tmp_path, max_epochs=1)
    assert first.windows == second.windows == [SEVEN[:3], SEVEN[3:6], SEVEN[6:]]
