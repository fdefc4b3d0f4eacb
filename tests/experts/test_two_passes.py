"""A block whose forward runs twice behaves as one that ran once, and what is no mixture is told on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ep import Layout, build_meshes, parallelize, remember_routing
from tests.list_models import HIDDEN, GatedMLP, HitBlock, Holder, MixtralBlock
from tests.parity import whole, worst
from tests.pool import RankError, RankPool

WORLD = 2


def _parallel(model: nn.Module, ep: int = WORLD, **options: Any) -> nn.Module:
    parallelize(model, build_meshes(Layout.for_world(WORLD, ep=ep), "cpu"), **options)
    return model


def _gradients(ours: nn.Module, plain: nn.ModuleList) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the stacked experts, and of the plain ones, stacked."""
    mine = whole({name: p.grad for name, p in ours.named_parameters()})
    right = {}
    for name in mine:
        parameters = [expert.get_parameter(name) for expert in plain]
        right[name] = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    return mine, right


class NoisyBlock(MixtralBlock):
    """Changes its input in place, draws noise, and keeps account of its forwards in every way there is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("load", torch.zeros(self.num_experts))
        self.tensor = torch.zeros(())
        self.count, self.list, self.dict = 0, [0], {"forwards": 0}

    def forward(self, hidden_states: Tensor) -> Any:
        hidden_states *= torch.empty_like(hidden_states).uniform_(0.9, 1.1)
        output = super().forward(hidden_states)
        self.load += F.one_hot(self.route(hidden_states)[1], self.num_experts).sum(dim=(0, 1))
        self.tensor += 1
        self.count += 1
        self.list.append(self.count)
        self.dict["forwards"] += 1
        return {"output": (output, self.gate(hidden_states)), "tokens": len(hidden_states)}

    def account(self) -> list[Any]:
        return [self.load.tolist(), float(self.tensor), self.count, self.list, self.dict]


def _noisy(ep: int) -> tuple[float, list[Any], list[Any], bool]:
    """On a rank: the difference from the plain block, both accounts, and whether random numbers go on alike."""
    torch.manual_seed(3)
    plain = NoisyBlock(8, 2, 16, False)
    ours = _parallel(copy.deepcopy(plain), ep)
    for steps in range(2):
        batch = torch.randn(6, HIDDEN)
        results = []
        for model in (plain, ours):
            torch.manual_seed(steps)
            output = model(batch.clone())
            assert output["tokens"] == 6
            results.append((*output["output"], torch.rand(1)))
        differences = [float((mine - right).abs().max()) for right, mine in zip(*results, strict=True)]
    return max(differences[:2]), plain.account(), ours.account(), differences[2] == 0


@pytest.mark.parametrize("ep", [1, 2])
def test_state_and_random_numbers_are_those_of_one_forward(ranks: RankPool, ep: int) -> None:
    for difference, plain, ours, same in ranks.run(_noisy, ep, world=WORLD):
        assert difference < 1e-5
        assert plain == ours and ours[2] == 2
        assert same


def _bits(block: type[MixtralBlock]) -> list[bool]:
    """On the only rank: what of output and gradients is that of the plain block, bit for bit."""
    torch.manual_seed(3)
    plain = block(8, 2, 16, False)
    ours = copy.deepcopy(plain)
    parallelize(ours, build_meshes(Layout.for_world(1, ep=1), "cpu"))
    batch = torch.randn(6, HIDDEN)
    outputs = ours(batch), plain(batch)
    for output in outputs:
        output.pow(2).sum().backward()
    mine, right = _gradients(ours.experts, plain.experts)
    return [torch.equal(*outputs), *(torch.equal(mine[name], right[name]) for name in right)]


@pytest.mark.parametrize("block", [MixtralBlock, HitBlock])
def test_ep_1_is_the_plain_block_bit_for_bit(ranks: RankPool, block: type[MixtralBlock]) -> None:
    assert ranks.run(_bits, block, world=1) == [[True] * 4]


class TwoLists(HitBlock):
    """Two lists in one block, one of them in a dictionary, the second of which works on what the first gave."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.more = nn.ModuleDict(
            {"router": nn.Linear(HIDDEN, 4), "mlps": nn.ModuleList([GatedMLP(HIDDEN, 8, True) for _ in range(4)])}
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = super().forward(hidden_states)
        chosen = self.more["router"](hidden_states).softmax(dim=-1)
        return sum(chosen[:, i, None] * mlp(hidden_states) for i, mlp in enumerate(self.more["mlps"]))


def _two_lists() -> list[tuple[float, str]]:
    torch.manual_seed(3)
    plain = TwoLists(8, 2, 16, False)
    ours = _parallel(copy.deepcopy(plain))
    batches = [torch.randn(0, HIDDEN), torch.randn(9, HIDDEN)]
    ours(batches[dist.get_rank()]).pow(2).sum().backward()
    plain(batches[1]).pow(2).sum().backward()
    gate = whole({"gate": ours.gate.weight.grad * WORLD})
    return [
        worst(*_gradients(ours.experts, plain.experts)),
        worst(*_gradients(ours.more["mlps"], plain.more["mlps"])),
        worst(gate, {"gate": plain.gate.weight.grad}),
    ]


def test_two_lists_in_one_block(ranks: RankPool) -> None:
    for found in ranks.run(_two_lists, world=WORLD):
        for error, name in found:
            assert error < 1e-5, f"{name} is off by {error:.1e}"


class NoisyExpert(GatedMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.dropout(super().forward(hidden_states), training=self.training)


class DropoutBlock(MixtralBlock):
    expert = NoisyExpert


def _dropout() -> tuple[bool, bool]:
    """On a rank: whether two forwards drop the same, and whether evaluation drops anything."""
    torch.manual_seed(3)
    plain = DropoutBlock(8, 2, 16, False)
    ours = _parallel(copy.deepcopy(plain))
    batch = torch.randn(6, HIDDEN)
    same = torch.equal(ours(batch) == 0, ours(batch) == 0)
    drops = bool((ours.eval()(batch) - plain.eval()(batch)).abs().max() > 1e-5)
    return same, drops


def test_dropout_inside_experts(ranks: RankPool) -> None:
    assert ranks.run(_dropout, world=WORLD) == [(False, False)] * WORLD


def _frozen_input() -> list[Any]:
    """On a rank: with a frozen router and inputs without gradients, the worst gradient; only rank 1 has tokens."""
    torch.manual_seed(3)
    plain = HitBlock(4, 2, 16, False)
    plain.gate.requires_grad_(False)
    plain.experts.requires_grad_(True)
    ours = _parallel(copy.deepcopy(plain))
    batches = [torch.randn(0, HIDDEN), torch.randn(9, HIDDEN)]
    ours(batches[dist.get_rank()]).pow(2).sum().backward()
    plain(batches[1]).pow(2).sum().backward()
    return [
        *worst(*_gradients(ours.experts, plain.experts)),
        ours.gate.weight.grad is None,
        ours.gate.weight.requires_grad,
    ]


def test_inputs_without_gradients(ranks: RankPool) -> None:
    for error, name, no_gradient, trained in ranks.run(_frozen_input, world=WORLD):
        assert error < 1e-5, f"{name} is off by {error:.1e}"
        assert no_gradient and not trained


class Towered(nn.Module):
    """A single block, in no list, beside a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])
        self.moe = HitBlock(8, 2, 16, False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.moe(self.tower[0](hidden))


def _towered() -> tuple[float, str]:
    torch.manual_seed(18)
    plain = Towered()
    ours = _parallel(copy.deepcopy(plain))
    batches = [torch.randn(0, HIDDEN), torch.randn(1, HIDDEN)]
    for _ in range(2):  # in the first an expert is tried out
        ours.zero_grad()
        ours(batches[dist.get_rank()]).pow(2).sum().backward()
    plain(batches[1]).pow(2).sum().backward()
    called = [number for number, expert in enumerate(plain.moe.experts) if expert.w1.weight.grad is not None]
    assert called == [0, 3], "not the experts of one rank"
    tower = whole({"tower": ours.tower[0].weight.grad * WORLD})
    mine, right = _gradients(ours.moe.experts, plain.moe.experts)
    return worst({**mine, **tower}, {**right, "tower": plain.tower[0].weight.grad})


def test_a_block_outside_of_the_layers(ranks: RankPool) -> None:
    """Also where a rank's experts are not called at all."""
    for error, name in ranks.run(_towered, world=WORLD):
        assert error < 1e-5, f"{name} is off by {error:.1e}"


class OneByOne(MixtralBlock):
    """Calls an expert for each token and choice, with `[H]`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, chosen = self.route(hidden_states)
        outputs = [
            sum(w * self.experts[e](hidden_states=token) for e, w in zip(es, ws, strict=True))
            for token, es, ws in zip(hidden_states, chosen.tolist(), weights, strict=True)
        ]
        return torch.stack(outputs)


class Reused(MixtralBlock):
    """Fills one buffer for each call, which autograd would not allow."""

    @torch.no_grad()
    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, chosen = self.route(hidden_states)
        buffer, output = torch.empty_like(hidden_states), torch.zeros_like(hidden_states)
        for i, expert in enumerate(self.experts[:]):
            output += expert(buffer.copy_(hidden_states)) * (weights * (chosen == i)).sum(dim=1, keepdim=True)
            buffer.zero_()
        return output


class HeldBlock(MixtralBlock):
    def __init__(self, num_experts: int, top_k: int, intermediate_size: int, bias: bool) -> None:
        super().__init__(num_experts, top_k, intermediate_size, bias)
        self.experts = Holder(num_experts, intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, chosen = self.route(hidden_states)
        return self.experts(hidden_states, chosen, weights=weights)


class Narrow(MixtralBlock):
    """Experts that give less than they take, of another dtype in between; a router `[H, E]`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = None
        self.w_gate = nn.Parameter(torch.randn(HIDDEN, self.num_experts))
        make = lambda: nn.Sequential(nn.Linear(HIDDEN, 16), nn.Tanh(), nn.Linear(16, 4))  # noqa: E731
        self.experts = nn.ModuleList([make() for _ in range(self.num_experts)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, chosen = (hidden_states @ self.w_gate).softmax(dim=-1).topk(self.top_k)
        output = hidden_states.new_zeros(len(hidden_states), 4)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            output.index_add_(0, token, expert(hidden_states[token]) * weights[token, slot, None])
        return output


def _outputs(block: type[MixtralBlock]) -> float:
    torch.manual_seed(3)
    plain = block(8, 2, 16, False)
    ours = _parallel(copy.deepcopy(plain))
    batch = torch.randn(6, HIDDEN)
    return float((ours(batch) - plain(batch)).abs().max())


@pytest.mark.parametrize("block", [OneByOne, Reused, HeldBlock, Narrow])
def test_ways_to_call_experts(ranks: RankPool, block: type[MixtralBlock]) -> None:
    assert max(ranks.run(_outputs, block, world=WORLD)) < 1e-5


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = HitBlock(8, 2, 16, False)
        self.options = options

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        return hidden + (checkpoint(self.moe, hidden, use_reentrant=False, **self.options) if self.options else hidden)


def _recomputed(dispatcher: str) -> list[tuple[float, str]]:
    """On a rank, the first of which has no tokens: the worst gradient, without and with remembered routing."""
    found = []
    for options in ({"preserve_rng_state": True}, {"context_fn": remember_routing}):
        torch.manual_seed(3)
        plain = Checkpointed(**options)
        ours = _parallel(copy.deepcopy(plain), dispatcher=dispatcher)
        batches = [torch.randn(0, HIDDEN), torch.randn(9, HIDDEN)]
        ours(batches[dist.get_rank()]).pow(2).sum().backward()
        plain(batches[1]).pow(2).sum().backward()
        found.append(worst(*_gradients(ours.moe.experts, plain.moe.experts)))
        gate = whole({"gate": ours.moe.gate.weight.grad})
        found.append(worst(gate, {"gate": plain.moe.gate.weight.grad / WORLD}))
    return found


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
def test_activation_checkpointing(ranks: RankPool, dispatcher: str) -> None:
    for found in ranks.run(_recomputed, dispatcher, world=WORLD):
        for error, name in found:
            assert error < 1e-5, f"{name} is off by {error:.1e}"


class Flipping(MixtralBlock):
    flips = False

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().route(hidden_states)
        return weights, (chosen + 1) % self.num_experts if self.flips else chosen


def _flipped() -> None:
    block = _parallel(Flipping(8, 2, 16, False))
    hidden = torch.randn(6, HIDDEN, requires_grad=True)
    output = checkpoint(block, hidden, use_reentrant=False, context_fn=remember_routing)
    Flipping.flips = True
    try:
        output.sum().backward()
    finally:
        Flipping.flips = False


def test_routing_that_recomputation_changes(ranks: RankPool) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(_flipped, world=WORLD)
    words = (
        "were called with other rows when activation checkpointing recomputed the forward than in the forward itself"
    )
    assert str(error.value).count(words) == WORLD


class Chain(nn.Module):
    """No mixture: MLPs one after the other, with a classifier of as many classes beside them."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GatedMLP(HIDDEN, 16, False) for _ in range(4)])
        self.classifier = nn.Linear(HIDDEN, 4)
        self.residual = residual
        if residual:  # at first each gives nothing
            for layer in self.layers:
                nn.init.zeros_(layer.w2.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return self.classifier(x)


class MixedRows(GatedMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) - hidden_states.mean(dim=0, keepdim=True)


class MixedRowsBlock(HitBlock):
    expert = MixedRows


class WeightedExpert(GatedMLP):
    def forward(self, hidden_states: Tensor, weights: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states) * (1 if weights is None else weights)


class WeightingBlock(HitBlock):
    expert = WeightedExpert

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, chosen = self.route(hidden_states)
        output = torch.zeros_like(hidden_states)
        for expert in chosen.unique():
            token, slot = torch.where(chosen == expert)
            rows = self.experts[expert](hidden_states[token], weights[token, slot, None])
            output = output.index_add(0, token, rows)
        return output


FORWARDS = [0]


class Forgetful(MixtralBlock):
    """Routes by a count that it keeps outside, from the second forward on."""

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = super().route(hidden_states)
        FORWARDS[0] += 1
        return weights, (chosen + max(0, FORWARDS[0] - 4)) % self.num_experts


def _told(make: Callable[[], nn.Module], ep: int, tokens: tuple[int, int], forwards: int) -> str:
    """On a rank: what is told, if anything."""
    FORWARDS[0] = 0
    model = _parallel(make(), ep)
    try:
        for _ in range(forwards):
            model(torch.randn(tokens[dist.get_rank()], HIDDEN))
    except (RuntimeError, TypeError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "nothing"


def _chain() -> nn.Module:
    return Chain(residual=False)


def _residual_chain() -> nn.Module:
    return Chain(residual=True)


def _block(kind: type[MixtralBlock]) -> nn.Module:
    return kind(8, 2, 16, False)


def _mixed_rows() -> nn.Module:
    return _block(MixedRowsBlock)


def _weighting() -> nn.Module:
    return _block(WeightingBlock)


def _forgetful() -> nn.Module:
    return _block(Forgetful)


@pytest.mark.parametrize("tokens", [(6, 6), (0, 6)])
@pytest.mark.parametrize("make", [_chain, _residual_chain])
def test_a_chain_is_no_mixture(ranks: RankPool, make: Callable[[], nn.Module], tokens: tuple[int, int]) -> None:
    for told in ranks.run(_told, make, 2, tokens, 1, world=WORLD):
        assert told.startswith(
            "RuntimeError: the experts of Chain (layers) were found as a ModuleList of equal MLPs beside a router, but"
            " what an expert is called with depends on what others gave, as in a chain of MLPs"
        )
        assert "Use ep=1, where each call computes by itself, or say what they are with register_experts" in told
    assert ranks.run(_told, make, 1, tokens, 1, world=WORLD) == ["nothing"] * WORLD


def test_an_expert_that_mixes_rows(ranks: RankPool) -> None:
    for told in ranks.run(_told, _mixed_rows, 2, (0, 6), 1, world=WORLD):
        assert "what an expert gives for a row depends on the other rows" in told
    assert ranks.run(_told, _mixed_rows, 1, (0, 6), 1, world=WORLD) == ["nothing"] * WORLD


def test_experts_that_are_called_with_more_than_rows(ranks: RankPool) -> None:
    idle, busy = ranks.run(_told, _weighting, 2, (0, 6), 1, world=WORLD)
    assert "the first pass over their block failed on another rank, which says why" in idle
    assert busy.startswith("TypeError: the experts of WeightingBlock (experts) were called with ([")
    assert f"but on other ranks they take rows [..., {HIDDEN}] and nothing else; apply anything more" in busy
    assert ranks.run(_told, _weighting, 1, (0, 6), 1, world=WORLD) == ["nothing"] * WORLD


def test_a_block_that_is_another_in_the_second_pass(ranks: RankPool) -> None:
    for told in ranks.run(_told, _forgetful, 2, (6, 6), 2, world=WORLD):
        assert (
            "were called otherwise in the second pass over their block than in the first, where the next call" in told
        )
        assert "Use ep=1 if it cannot" in told


def _from_outside(ep: int) -> str:
    block = _parallel(MixtralBlock(4, 2, 16, False), ep)
    assert len(block.experts) == 4 and [type(e).__name__ for e in block.experts[1:3]] == ["Member"] * 2
    assert block.experts[0].w1.in_features == HIDDEN
    assert repr(block.experts).startswith("StackedMembers(\n  4 x GatedMLP")
    with pytest.raises(IndexError):
        block.experts[4]
    try:
        block.experts[-1](torch.zeros(2, HIDDEN))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_an_expert_that_is_called_from_outside(ranks: RankPool) -> None:
    for told in ranks.run(_from_outside, 2, world=WORLD):
        assert told.startswith(
            "an expert (GatedMLP) was called outside of the forward of the module that holds the list of experts"
        )
