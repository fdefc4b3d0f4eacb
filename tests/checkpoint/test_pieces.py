"""The record of where the plain model's tensors are takes weights and optimizer state both ways, as the adapters do."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_moe_ep.checkpoint import names
from lightning_moe_ep.checkpoint.convert import optimizer_to_file, optimizer_to_folder
from lightning_moe_ep.checkpoint.pieces import (
    describe_optimizers,
    describe_pieces,
    sources_of_pieces,
    to_parallel,
    to_plain,
)
from lightning_moe_ep.checkpoint.rebuilt import _spread
from lightning_moe_ep.checkpoint.stored import Stored
from lightning_moe_ep.trees import map_leaves
from tests.families.find import families
from tests.families.tiny import tiny_model
from tests.list_models import ListModel
from tests.matrix import mostly_in_the_sweep

REFUSED = {"nllb-moe", "switch_transformers"}


def stored(tree: Any) -> Any:
    return map_leaves(lambda leaf: Stored.of(leaf.detach()) if isinstance(leaf, Tensor) else leaf, tree)


def whole(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, Stored) else leaf, tree)


def check_same(ours: Any, theirs: Any, path: str = "") -> None:
    assert type(ours) is type(theirs), path
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key in theirs:
            check_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), path
        for number, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
            check_same(mine, right, f"{path}[{number}]")
    else:
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs, path


def check_both_ways(model: nn.Module) -> dict[str, Any]:
    """That the record does to a plain model's weights what spreading its experts does."""
    plain = copy.deepcopy(dict(model.state_dict()))
    _spread(model)
    pieces = json.loads(json.dumps(describe_pieces(model)))  # of plain types
    parallel = dict(model.state_dict())
    check_same(whole(to_parallel(pieces, stored(plain))), parallel)
    check_same(whole(to_plain(pieces, stored(parallel))), plain)
    for name, sources in sources_of_pieces(pieces).items():
        assert name in plain and set(sources) <= parallel.keys()
    return pieces


@pytest.mark.parametrize(
    "family", mostly_in_the_sweep([f for f in families() if f not in REFUSED], "longcat_flash", "qwen3_moe")
)
def test_a_family(family: str) -> None:
    assert bool(check_both_ways(tiny_model(family))) == (family == "longcat_flash")


def _lists() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(ListModel("own_list_scaled", num_experts=4, top_k=2, intermediate_size=16, bias=True))


def test_a_list() -> None:
    pieces = check_both_ways(_lists())
    assert set(pieces) == {f"0.blocks.{block}.moe.experts." for block in range(2)}


def _optimizer(model: nn.Module, kind: str) -> Optimizer:
    parameters = dict(model.named_parameters())
    if kind == "named":
        return AdamW(model.named_parameters(), lr=1e-2, amsgrad=True)
    if kind == "momentum":
        return SGD(model.parameters(), lr=1e-2, momentum=0.9)
    if kind == "sgd":
        return SGD(model.parameters(), lr=1e-2)
    down = [p for name, p in parameters.items() if name.endswith("down.weight")]
    others = [p for name, p in parameters.items() if not name.endswith(("down.weight", "gain"))]
    return AdamW([{"params": others, "lr": 1e-3}, {"params": down}], lr=1e-2)


def _stepped(kind: str) -> tuple[nn.Module, Optimizer, dict[str, Any], list[list[str]]]:
    """A model with stacked experts, its optimizer after two steps, its state by names as a folder has it, the names."""
    model = _lists()
    _spread(model)
    optimizer = _optimizer(model, kind)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    (of_groups,) = describe_optimizers(model, [optimizer])
    known = [name for group in of_groups for name in group]
    saved = optimizer.state_dict()
    return (
        model,
        optimizer,
        {
            "state": {known[number]: state for number, state in saved["state"].items()},
            "param_groups": [
                {**group, "params": of_group} for group, of_group in zip(saved["param_groups"], of_groups, strict=True)
            ],
        },
        of_groups,
    )


@pytest.mark.parametrize("kind", ["groups", "named", "momentum", "sgd"])
def test_optimizer_state(kind: str) -> None:
    model, optimizer, by_name, of_groups = _stepped(kind)
    pieces = describe_pieces(model)
    made = optimizer_to_file(pieces, stored(by_name))
    right = names.optimizer_to_file(model, optimizer, optimizer.state_dict())
    check_same(whole(made), right)
    back = whole(optimizer_to_folder(pieces, stored(right), of_groups))
    if kind == "named":  # the file has the plain model's names; who resumes has its own
        for group in back["param_groups"]:
            group["param_names"] = group["params"]
    check_same(back, by_name)


def test_an_optimizer_of_other_parameters_has_no_names() -> None:
    model = _lists()
    own = SGD(model.parameters(), lr=1e-2)
    assert describe_optimizers(model, [own]) == [[list(dict(model.named_parameters()))]]
    assert describe_optimizers(model, [own, SGD([nn.Parameter(torch.ones(2))], lr=1e-2)]) == []


def test_experts_that_were_stepped_less_often() -> None:
    """In a file one expert's count is less, and another has no state: the largest count, and zeros."""
    model, optimizer, _, of_groups = _stepped("momentum")
    optimizer = AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    file = names.optimizer_to_file(model, optimizer, optimizer.state_dict())
    numbers = {name: n for n, name in enumerate(_lists().state_dict())}
    shift = [numbers[f"0.blocks.1.moe.experts.{expert}.shift"] for expert in range(4)]
    file["state"][shift[0]]["step"] -= 1
    del file["state"][shift[1]]
    right = [file["state"].get(n, {"exp_avg": torch.zeros(16)})["exp_avg"] for n in shift]
    made = whole(optimizer_to_folder(describe_pieces(model), stored(file), of_groups))
    kept = made["state"]["0.blocks.1.moe.experts.shift"]
    assert float(kept["step"]) == 1
    assert torch.equal(kept["exp_avg"], torch.stack(right))


def test_what_cannot_be_divided() -> None:
    model, _, by_name, of_groups = _stepped("groups")
    name = "0.blocks.1.moe.experts.down.weight"
    by_name["state"][name]["row"] = torch.zeros(4, 3)
    with pytest.raises(
        NotImplementedError, match=r"keeps a row of shape \[4, 3\] for a parameter of shape \[4, 64, 16\]"
    ):
        optimizer_to_file(describe_pieces(model), stored(by_name))
    right = optimizer_to_file(describe_pieces(model), stored(_stepped("groups")[2]))
    right["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match="a group has 7 parameters, but its names are of 8"):
        optimizer_to_folder(describe_pieces(model), right, of_groups)
