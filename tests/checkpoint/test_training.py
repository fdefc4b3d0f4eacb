"""Resuming, in both forms, from any layout at any other; the oracle is plain Lightning on one device."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.runs import EP2, EP4, FORMS, FSDP, MIXED, MODELS, REPLICAS, SINGLE, At, N, Outcome, Run, on, run
from tests.contract import contract
from tests.matrix import mostly_more
from tests.parity import worst
from tests.pool import RankPool


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Key by key, in order, and bit for bit."""
    return list(ours) == list(theirs) and all(
        ours[key].dtype == theirs[key].dtype and torch.equal(ours[key], theirs[key]) for key in theirs
    )


@pytest.fixture(scope="module")
def straight() -> dict[str, Outcome]:
    """By model: plain Lightning on one device, 2N steps without a stop."""
    return {model: run(Run(model=model, max_steps=2 * N)) for model in MODELS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def saved(ranks: RankPool, folder: Path, of: Run) -> str:
    """The checkpoint after N steps of the run, made by the first test that asks for it."""
    path = folder / f"{of.at or 'plain'} {of.form} {of.model} {of.optimizer}.ckpt"
    if not path.exists():
        on(ranks, replace(of, save=str(path)))
    return str(path)


def check_resumed(ranks: RankPool, straight: dict[str, Outcome], to: Run) -> None:
    right = straight[to.model]
    for outcome in on(ranks, to):
        assert outcome.global_step == 2 * N
        assert outcome.rate == pytest.approx(3e-3 / (1 + 2 * N))
        error, name = worst(outcome.weights, right.weights)
        assert error < 1e-5, f"{name} is off by {error:.1e}"


WAYS: list[tuple[At, At]] = [
    (SINGLE, EP2),
    (EP2, EP4),
    (EP4, FSDP),
    (FSDP, REPLICAS),
    (REPLICAS, MIXED),
    (MIXED, SINGLE),
]
"""Of the ways from each layout to each, those that `make test` goes."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "way",
    [
        way if way in WAYS else pytest.param(way, marks=pytest.mark.more)
        for way in product([SINGLE, FSDP, EP2, MIXED, EP4, REPLICAS], repeat=2)
    ],
    ids=lambda way: f"{way[0]} to {way[1]}",
)
def test_resuming_at_another_layout_equals_not_stopping(
    ranks: RankPool, straight: dict[str, Outcome], folder: Path, way: tuple[At, At], form: str
) -> None:
    source, target = way
    path = saved(ranks, folder, Run(source, form))
    assert os.path.isdir(path) == FORMS[form]
    check_resumed(ranks, straight, Run(target, form, resume=path, max_steps=2 * N))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", mostly_more([m for m in MODELS if m != "even"], "6 experts of odd width"))
@pytest.mark.parametrize("way", [(MIXED, EP2), (EP2, MIXED), (MIXED, SINGLE)], ids=lambda way: f"{way[0]} to {way[1]}")
def test_uneven_shards(
    ranks: RankPool, straight: dict[str, Outcome], folder: Path, way: tuple[At, At], model: str, form: str
) -> None:
    source, target = way
    path = saved(ranks, folder, Run(source, form, model))
    check_resumed(ranks, straight, Run(target, form, model, resume=path, max_steps=2 * N))


@pytest.mark.parametrize("model", MODELS)
def test_one_file_goes_on_in_plain_lightning(
    ranks: RankPool, straight: dict[str, Outcome], folder: Path, model: str
) -> None:
    path = saved(ranks, folder, Run(MIXED, "file", model))
    check_resumed(ranks, straight, Run(None, model=model, resume=path, max_steps=2 * N))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_a_plain_lightning_checkpoint_goes_on_here(
    ranks: RankPool, straight: dict[str, Outcome], folder: Path, model: str, form: str
) -> None:
    path = saved(ranks, folder, Run(None, model=model))
    check_resumed(ranks, straight, Run(MIXED, form, model, resume=path, max_steps=2 * N))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("at", mostly_more([MIXED, REPLICAS], MIXED), ids=str)
def test_one_file_is_what_one_device_would_save(ranks: RankPool, tmp_path: Path, model: str, at: At) -> None:
    first, last = str(tmp_path / "first.ckpt"), str(tmp_path / "last.ckpt")
    plain_first, plain_last = str(tmp_path / "plain-first.ckpt"), str(tmp_path / "plain-last.ckpt")
    weights = on(ranks, Run(at, "file", model, max_steps=1, save_first=first, save=last))[0].weights
    on(ranks, Run(None, "file", model, max_steps=1, save_first=plain_first, save=plain_last))

    ours, theirs = torch.load(first), torch.load(plain_first)
    assert ours.keys() == {*theirs.keys(), "moe_ep"}
    assert same(ours["state_dict"], theirs["state_dict"])

    ours, theirs = torch.load(last), torch.load(plain_last)
    assert same(ours["state_dict"], {f"model.{name}": value for name, value in weights.items()})
    (ours,), (theirs,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, right in theirs["state"].items():
        assert ours["state"][number].keys() == right.keys()
        assert ours["state"][number]["step"] == right["step"]
        moments = {key: value for key, value in ours["state"][number].items() if key != "step"}
        error, name = worst(moments, {key: right[key] for key in moments})
        assert error < 1e-4, f"{name} of parameter {number} is off by {error:.1e}"


@contract("Optimizers", "an optimizer without state", "works, and resumes from either form of checkpoint")
@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_without_state(ranks: RankPool, folder: Path, form: str) -> None:
    path = saved(ranks, folder, Run(MIXED, form, optimizer="sgd"))
    right = run(Run(optimizer="sgd", max_steps=2 * N))
    for outcome in on(ranks, Run(EP2, form, optimizer="sgd", resume=path, max_steps=2 * N)):
        assert outcome.global_step == 2 * N
        error, name = worst(outcome.weights, right.weights)
        assert error < 1e-5, f"{name} is off by {error:.1e}"
