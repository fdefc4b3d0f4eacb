"""One file has the plain model's names, and its optimizer's state expert by expert, both ways."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from transformers import AutoConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

from lightning_moe_ep import Layout, build_meshes, parallelize
from lightning_moe_ep.checkpoint import full_model_state, full_optimizer_state, load
from lightning_moe_ep.experts import ep_size, expert_parameters
from lightning_moe_ep.gradients import scale_gradients
from tests.list_models import HIDDEN, ListModel
from tests.pool import RankPool

BATCH = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1))


def _plain(kind: str = "own_list_scaled") -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(ListModel(kind, num_experts=4, top_k=2, intermediate_size=16, bias=True))


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(BATCH).pow(2).mean().backward()
    scale_gradients(expert_parameters(model), 1 / ep_size(model))
    optimizer.step()


def _optimizer(model: nn.Module, kind: str) -> Optimizer:
    if kind == "named":
        return AdamW(model.named_parameters(), lr=1e-2, eps=1e-4, amsgrad=True)
    if kind == "momentum":
        return SGD(model.parameters(), lr=1e-2, momentum=0.9)
    if kind == "sgd":
        return SGD(model.parameters(), lr=1e-2)
    # Weights and biases apart, the latter first; one of the experts' parameters is not trained.
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith("gain")}
    of_down = [p for name, p in parameters.items() if name.endswith("down.weight")]
    others = [p for name, p in parameters.items() if not name.endswith("down.weight")]
    return AdamW([{"params": others, "lr": 1e-3}, {"params": of_down}], lr=1e-2, eps=1e-4)


def _parallel(plain: nn.Module) -> nn.Module:
    model = copy.deepcopy(plain)
    parallelize(model, build_meshes(Layout.for_world(2, ep=2), "cpu"))
    return model


def _check_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Values to round-off, all else exactly, keys in order."""
    assert type(ours) is type(theirs), path
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key in theirs:
            _check_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda message: f"{path}: {message}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        for number, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
            _check_same(mine, right, f"{path}[{number}]")
    else:
        assert ours == theirs, path


def _there_and_back(kind: str, folder: str) -> int:
    """On a rank: a file of ours is that of the plain model, and either goes on here as there."""
    plain = _plain()
    ours = _parallel(plain)
    optimizers = _optimizer(plain, kind), _optimizer(ours, kind)
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        _step(model, optimizer)
        _step(model, optimizer)
    state, of_optimizer = full_model_state(ours), full_optimizer_state(ours, optimizers[1])
    if dist.get_rank() == 0:
        _check_same(dict(state), dict(plain.state_dict()))
        _check_same(of_optimizer, optimizers[0].state_dict())
        torch.save(
            {"state_dict": plain.state_dict(), "optimizer_states": [optimizers[0].state_dict()]}, f"{folder}/plain"
        )
    dist.barrier()

    fresh = _parallel(_plain())
    resumed = _optimizer(fresh, kind)
    load(Path(folder) / "plain", fresh, [resumed], strict=True, weights_only=True)
    _step(plain, optimizers[0])
    _step(fresh, resumed)
    state, of_optimizer = full_model_state(fresh), full_optimizer_state(fresh, resumed)
    if dist.get_rank() == 0:
        _check_same(dict(state), dict(plain.state_dict()))
        _check_same(of_optimizer, optimizers[0].state_dict())
    return len(state)


@pytest.mark.parametrize("kind", ["groups", "named", "momentum", "sgd"])
def test_optimizer_state_is_that_of_the_plain_model(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    # In each of two blocks: a norm, the router and 4 experts with 7 parameters; and the head.
    assert ranks.run(_there_and_back, kind, str(tmp_path), world=2) == [2 * (2 + 1 + 4 * 7) + 2, 0]


def _uneven_steps(folder: str) -> tuple[float, list[float], bool]:
    """On a rank: from a file in which an expert was stepped less, and one never: its step, and a moment."""
    plain = _plain()
    optimizer = AdamW(plain.parameters(), eps=1e-4)
    _step(plain, optimizer)
    state = optimizer.state_dict()
    numbers = {name: n for n, (name, _) in enumerate(plain.named_parameters())}
    right = [state["state"][numbers[f"0.blocks.1.moe.experts.{n}.shift"]]["exp_avg"].clone() for n in range(4)]
    state["state"][numbers["0.blocks.1.moe.experts.0.shift"]]["step"] -= 1
    del state["state"][numbers["0.blocks.1.moe.experts.1.shift"]]
    right[1].zero_()
    if dist.get_rank() == 0:
        torch.save({"state_dict": plain.state_dict(), "optimizer_states": [state]}, f"{folder}/plain")
    dist.barrier()
    ours = _parallel(plain)
    resumed = AdamW(ours.parameters(), eps=1e-4)
    load(Path(folder) / "plain", ours, [resumed], strict=True, weights_only=True)
    kept = resumed.state[ours.get_parameter("0.blocks.1.moe.experts.shift")]
    moments = kept["exp_avg"].full_tensor()
    return float(kept["step"]), moments[1].tolist(), torch.equal(moments, torch.stack(right))


def test_experts_that_were_stepped_less_often(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_uneven_steps, str(tmp_path), world=2) == [(1.0, [0.0] * 16, True)] * 2


def _loaded(change: str, strict: bool, path: str) -> str:
    """On a rank: what is told of a file that was changed."""
    plain = _plain("own_list_mixtral")
    state = {f"{key}": value + 1 for key, value in plain.state_dict().items()}
    prefix = "0.blocks.1.moe.experts."
    if change == "missing":
        del state[f"{prefix}2.w1.weight"]
    elif change == "all missing":
        state = {key: value for key, value in state.items() if not key.startswith(prefix)}
    elif change == "unexpected":
        state[f"{prefix}4.w1.weight"] = torch.zeros(2)
    elif change == "shape":
        state[f"{prefix}3.w2.bias"] = torch.zeros(5)
    elif change == "elsewhere":
        state["0.other"] = state.pop("0.head.bias")
    if dist.get_rank() == 0:
        torch.save({"state_dict": state}, path)
    dist.barrier()
    ours = _parallel(plain)
    try:
        load(Path(path), ours, [], strict=strict, weights_only=True)
    except RuntimeError as error:
        return str(error)
    loaded = full_model_state(ours)
    differing = [key for key in loaded if key in state and not torch.equal(loaded[key], state[key])]
    return f"differing: {differing}"


@pytest.mark.parametrize(
    ("change", "strict", "words"),
    [
        ("missing", True, 'Missing key(s) in state_dict: "0.blocks.1.moe.experts.2.w1.weight".'),
        ("unexpected", True, 'Unexpected key(s) in state_dict: "0.blocks.1.moe.experts.4.w1.weight".'),
        (
            "shape",
            True,
            "size mismatch for 0.blocks.1.moe.experts.3.w2.bias: copying a param with shape torch.Size([5]) from"
            " checkpoint, the shape in current model is torch.Size([64]).",
        ),
        (
            "missing",
            False,
            "0.blocks.1.moe.experts takes all or none of its 24 tensors, as it is stacked, but the checkpoint has 23 of"
            " them: 0.blocks.1.moe.experts.2.w1.weight is missing.",
        ),
        (
            "elsewhere",
            True,
            'Missing key(s) in state_dict: "0.head.bias".\n\tUnexpected key(s) in state_dict: "0.other".',
        ),
    ],
)
def test_what_does_not_match_is_told_by_the_names_in_the_file(
    ranks: RankPool, tmp_path: Path, change: str, strict: bool, words: str
) -> None:
    expected = f"Error(s) in loading state_dict for FSDPSequential:\n\t{words}"
    assert ranks.run(_loaded, change, strict, str(tmp_path / "c"), world=2) == [expected] * 2


@pytest.mark.parametrize("change", ["nothing", "all missing", "unexpected", "elsewhere"])
def test_what_need_not_match_is_loaded(ranks: RankPool, tmp_path: Path, change: str) -> None:
    assert ranks.run(_loaded, change, False, str(tmp_path / "c"), world=2) == ["differing: []"] * 2


def _other_groups(folder: str) -> str:
    plain = _plain()
    optimizer = AdamW([{"params": [p for p in plain.parameters() if p.ndim > 1]}])
    if dist.get_rank() == 0:
        torch.save({"state_dict": plain.state_dict(), "optimizer_states": [optimizer.state_dict()]}, f"{folder}/plain")
    dist.barrier()
    ours = _parallel(plain)
    matrices = AdamW([{"params": [p for p in ours.parameters() if p.ndim > 1]}])
    with pytest.raises(ValueError) as error:
        load(Path(folder) / "plain", ours, [matrices], strict=True, weights_only=True)
    return str(error.value)


def test_groups_by_dimensions(ranks: RankPool, tmp_path: Path) -> None:
    told = (
        "group 0 of the AdamW in the checkpoint has 19 parameters, that of the model 51; group them as they were"
        " grouped then (by ndim? stacked experts have one more)"
    )
    assert ranks.run(_other_groups, str(tmp_path), world=2) == [told] * 2


def _odd_state() -> str:
    plain = _plain()
    ours = _parallel(plain)
    optimizer = SGD(ours.parameters(), lr=1e-2)
    for parameter in ours.parameters():
        optimizer.state[parameter]["rows"] = torch.zeros(3)
    try:
        full_optimizer_state(ours, optimizer)
    except NotImplementedError as error:
        return str(error)
    return "nothing"


def test_state_that_cannot_be_divided(ranks: RankPool) -> None:
    first, _ = ranks.run(_odd_state, world=2)
    assert first.startswith(
        "the optimizer keeps a rows of shape [3] for a parameter of shape [4, 64, 16], which cannot"
    )


class Longcat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = AutoConfig.for_model(
            "longcat_flash", hidden_size=16, expert_ffn_hidden_size=8, n_routed_experts=4, zero_expert_num=2
        )
        self.before, self.experts = nn.Linear(16, 16), LongcatFlashExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        index = (torch.arange(len(hidden))[:, None] + torch.arange(2)) % 6
        return self.experts(self.before(hidden), index, torch.ones(len(hidden), 2))


def _longcat(folder: str) -> list[str]:
    """On a rank: what a file of ours has, and that the plain model's optimizer goes on from it."""
    torch.manual_seed(3)
    plain = Longcat()
    ours = _parallel(plain)
    batch = torch.randn(12, 16)
    optimizer, theirs = AdamW(ours.parameters(), eps=1e-4), AdamW(plain.parameters(), eps=1e-4)
    for model, stepped in ((plain, theirs), (ours, optimizer)):
        model(batch).pow(2).mean().backward()
        scale_gradients(expert_parameters(model), 1 / ep_size(model))
        stepped.step()
    state, of_optimizer = full_model_state(ours), full_optimizer_state(ours, optimizer)
    if dist.get_rank() == 0:
        _check_same(dict(state), dict(plain.state_dict()))
        _check_same(of_optimizer, theirs.state_dict())
        torch.save({"state_dict": state, "optimizer_states": [of_optimizer]}, f"{folder}/c")
    dist.barrier()
    fresh = _parallel(Longcat())
    resumed = AdamW(fresh.parameters(), eps=1e-4)
    load(Path(folder) / "c", fresh, [resumed], strict=True, weights_only=True)
    for (name, mine), right in zip(fresh.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), right.full_tensor())
        if right not in optimizer.state:  # the unused rows have no gradient here, and zeros in the plain model
            assert name == "experts.gate_up_proj_of_zero_experts"
            assert float(resumed.state[mine]["exp_avg"].full_tensor().abs().max()) == 0
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(resumed.state[mine][key].full_tensor(), optimizer.state[right][key].full_tensor())
        assert resumed.state[mine]["step"] == optimizer.state[right]["step"]
    return list(state)


def test_longcat_flash(ranks: RankPool, tmp_path: Path) -> None:
    names = ["before.weight", "before.bias", "experts.gate_up_proj", "experts.down_proj"]
    assert ranks.run(_longcat, str(tmp_path), world=2) == [names, []]
