"""A forward that is routed as a recorded one gives what that gave, whatever has become of the router since."""

from __future__ import annotations

import copy
import io
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe_ep import Layout, Routing, build_meshes, parallelize, record_routing, replay_routing
from lightning_moe_ep.experts import find_routers
from tests.families.find import families
from tests.families.tiny import loss_of as loss_of_family
from tests.families.tiny import tiny_batch, tiny_model
from tests.models import build, loss_of, make_batch
from tests.parity import plain, worst
from tests.pool import RankPool

KIND = "qwen3_moe"


def model_of(kind: str = KIND, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(kind, **options)


def parallel(ep: int, kind: str = KIND, **options: Any) -> nn.Module:
    model = model_of(kind)
    parallelize(model, build_meshes(Layout.for_world(dist.get_world_size(), ep=ep), "cpu"), **options)
    return model


def batches(rank: int, kind: str = KIND) -> list[dict[str, Tensor]]:
    """Two micro-batches, of other lengths."""
    return [make_batch(kind, 16, seed=rank), make_batch(kind, 24 - 8 * rank, seed=10 + rank)]


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Change the routers, on every rank alike."""
    for router in find_routers(model).values():
        for parameter in router.parameters():
            parameter.mul_(-1.5).add_(0.1)


def saved(routing: Routing) -> Routing:
    file = io.BytesIO()
    torch.save(routing.to("cpu"), file)
    file.seek(0)
    return torch.load(file)


def same_index(one: Routing, other: Routing) -> bool:
    assert one.index.keys() == other.index.keys()
    pairs = zip(chain(*one.index.values()), chain(*other.index.values()), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def losses(model: nn.Module, kind: str = KIND) -> list[Tensor]:
    return [loss_of(model, batch) for batch in batches(dist.get_rank(), kind)]


def _recorded(kind: str, ep: int, **options: Any) -> tuple[list[float], Routing]:
    model = parallel(ep, kind, **options)
    with record_routing(model) as routing:
        before = losses(model, kind)
        sum(before).backward()  # what is recomputed is not noted again
    disturb(model)
    other = losses(model, kind)
    with replay_routing(model, saved(routing), weights="recorded"):
        again = losses(model, kind)
        wrong = r"forward 2 of .*experts is to be replayed, but 2 were recorded"
        with record_routing(model) as twice, pytest.raises(ValueError, match=wrong):
            losses(model, kind)
        sum(again).backward()
    assert not any(twice.index.values())
    assert all((a - b).abs() > 1e-4 for a, b in zip(before, other, strict=True))
    assert [loss.item() for loss in again] == [loss.item() for loss in before]
    # Nothing is left behind.
    assert [loss.item() for loss in losses(model, kind)] == [loss.item() for loss in other]
    return [loss.item() for loss in before], routing.to("cpu")


def _everywhere() -> None:
    first, routing = _recorded(KIND, 2, dispatcher="all_to_all", activation_checkpointing="selective")
    for ep, options in ((2, {"dispatcher": "all_gather"}), (1, {"activation_checkpointing": "full"})):
        found, same = _recorded(KIND, ep, **options)
        assert found == pytest.approx(first, rel=1e-5)
        assert same_index(routing, same)
    # At another layout, and in a plain model.
    for other in (parallel(1), model_of()):
        disturb(other)
        with replay_routing(other, routing, weights="recorded"):
            assert [loss.item() for loss in losses(other)] == pytest.approx(first, rel=1e-5)
    _recorded("own", 2, dispatcher="three_chunks")


def test_equal_outputs_after_the_routers_have_changed(ranks: RankPool) -> None:
    ranks.run(_everywhere, world=2)


def _with_no_expert() -> list[tuple[float, ...]]:
    """The losses where a token's ids are none: in a plain model, at ep=1 and at ep=2."""
    ids = batches(0)[0]
    results = []
    for implementation, model in (
        ("eager", model_of()),
        ("grouped_mm", model_of()),
        ("batched_mm", model_of()),
        ("grouped_mm", parallel(1, activation_checkpointing="selective")),
        ("batched_mm", parallel(1, kernels=["batched_mm"])),
        ("grouped_mm", parallel(2)),
    ):
        model.set_experts_implementation(implementation)
        with record_routing(model) as routing:
            loss_of(model, ids)
        for forwards in routing.index.values():
            forwards[0][0], forwards[0][1] = -1, torch.tensor([8, 200])
        told = []
        for weights in ("recorded", "current"):
            with replay_routing(model, routing, weights=weights):
                told.append(loss_of(model, ids))
        sum(told).backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        results.append(tuple(loss.item() for loss in told))
    return results


def test_an_id_that_is_none_chooses_no_expert(ranks: RankPool) -> None:
    results = ranks.run(_with_no_expert, world=2)[0]
    assert all(each == pytest.approx(results[-1], rel=1e-5) for each in results), results


def _like_the_engine(routing: Routing) -> list[Tensor]:
    """`[T, layers, K]` for each forward."""
    return [torch.stack(forward, dim=1).to(torch.uint8) for forward in zip(*routing.index.values(), strict=True)]


def _gradients(ep: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """On a rank: the disturbed model's weights, its gradients by a replay, and what was replayed."""
    model = parallel(ep, **options)
    with record_routing(model) as routing, torch.no_grad():
        losses(model)
    index = _like_the_engine(routing)
    disturb(model)
    weights = plain(model, dict(model.named_parameters()))
    with replay_routing(model, Routing.from_layers(model, index), weights="current"):
        total = sum(losses(model))
    total.backward()
    return weights, plain(model, {name: p.grad for name, p in model.named_parameters()}), index


def _oracle(weights: dict[str, Tensor], index_of_ranks: list[list[Tensor]]) -> dict[str, Tensor]:
    """One process, whose routers are given their choice and weigh it as the family does."""
    model = model_of()
    model.load_state_dict(weights)
    given: list[Tensor] = []

    def route(router: nn.Module, args: tuple[Tensor], _: Any) -> tuple[Tensor, ...]:
        logits = F.linear(args[0].reshape(-1, args[0].shape[-1]), router.weight)
        index = given.pop(0).long()
        values = logits.softmax(dim=-1).gather(1, index)
        return logits, values / values.sum(dim=-1, keepdim=True), index

    for router in find_routers(model).values():
        router.register_forward_hook(route)
    for rank, index in enumerate(index_of_ranks):
        for batch, ids in zip(batches(rank), index, strict=True):
            given += ids.unbind(dim=1)
            (loss_of(model, batch) / len(index_of_ranks)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ep", "options"),
    [
        (2, {"dispatcher": "all_to_all", "activation_checkpointing": "full"}),
        pytest.param(1, {"activation_checkpointing": "selective"}, marks=pytest.mark.more),
        pytest.param(2, {"dispatcher": "all_gather"}, marks=pytest.mark.more),
    ],
)
def test_gradients_with_the_weights_of_today(ranks: RankPool, ep: int, options: dict[str, Any]) -> None:
    results = ranks.run(_gradients, ep, options, world=2)
    weights, gradients, _ = results[0]
    right = _oracle(weights, [index for _, _, index in results])
    scale = {name: ours * (1 / ep if ".experts." in name else 1) for name, ours in gradients.items()}
    error, name = worst(scale, right)
    assert error < 1e-5, f"{name} is off by {error:.1e}"
    assert all(right[name].abs().max() > 1e-6 for name in right if ".gate." in name)


def _refused_on_one_rank() -> list[str]:
    model, rank = parallel(2), dist.get_rank()
    with record_routing(model) as routing, torch.no_grad():
        losses(model)
    told = []

    def attempt(changed: Routing, weights: Any = "recorded") -> None:
        with pytest.raises(ValueError) as error, replay_routing(model, changed, weights=weights):
            losses(model)
        told.append(str(error.value))

    first = next(iter(routing.index))
    attempt(Routing({k: v for k, v in routing.index.items() if rank or k != first}, routing.weights))
    attempt(Routing({k: [i[rank:] for i in v] for k, v in routing.index.items()}), "current")
    attempt(Routing(*({k: v[: 2 - rank] for k, v in of.items()} for of in (routing.index, routing.weights))))
    attempt(Routing(routing.index))
    attempt(Routing({k: [i.float() for i in v] for k, v in routing.index.items()}), "current")
    arrays = {k: [i.numpy() if rank else i for i in v] for k, v in routing.index.items()}
    attempt(Routing(arrays), "current")  # type: ignore[arg-type]
    attempt(Routing({k: [i.bool() for i in v] for k, v in routing.index.items()}), "current")
    attempt(routing.index if rank else routing, "current")  # type: ignore[arg-type]
    attempt(routing, "both")
    compiled = parallel(2, compile_blocks=True)
    with pytest.raises(ValueError, match="which what compile_blocks compiled cannot; use"):
        replay_routing(compiled, routing, weights="current").__enter__()
    # And afterwards all is as ever.
    with replay_routing(model, routing, weights="current"):
        losses(model)
    return told


def test_what_does_not_fit_is_refused_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(_refused_on_one_rank, world=2)
    assert first == second
    layers, tokens, forwards, no_weights, floats, arrays, bools, no_routing, unknown = first
    assert layers.startswith("rank 0: the routing is of 1 experts modules, but the model has 2 (only in the model: ")
    assert "model.layers.0.mlp.experts" in layers
    assert tokens == "rank 1: in forward 0 of model.layers.0.mlp.experts [T, K] is [16, 2], but [15, 2] was recorded"
    assert forwards == "rank 1: forward 1 of model.layers.0.mlp.experts is to be replayed, but 1 were recorded"
    assert no_weights.startswith(
        "the routing has no weights for each index of model.layers.0.mlp.experts; use weights="
    )
    assert floats.endswith("is [16, 2] of torch.float32, but has to be a tensor [T, K] of integers")
    index = "rank 1: the index of model.layers.0.mlp.experts"
    assert arrays == f"{index} is ndarray, but has to be a tensor [T, K] of integers"
    assert "is [16, 2] of torch.bool, but has to be" in bools
    assert no_routing == "rank 1: the routing is a dict, but has to be a Routing"
    assert unknown == "weights='both' is not known; use one of ['recorded', 'current']"


def test_what_cannot_be_replayed_is_refused() -> None:
    for kind, name in (("own_list_mixtral", "experts"), ("jetmoe", "layers.0.mlp.input_linear")):
        model = tiny_model(kind) if kind == "jetmoe" else build(kind)
        with pytest.raises(ValueError, match=rf"the experts of \S*{name} .*no routing \[T, K\]"), record_routing(model):
            pass
    model = model_of()
    ids = batches(0)[0]
    with record_routing(model) as routing:
        loss_of(model, ids)
    model.model.gradient_checkpointing = True
    replaying = replay_routing(model, routing, weights="recorded")
    with pytest.raises(ValueError, match="has gradient_checkpointing on in a plain model"), replaying:
        pass
    model.model.gradient_checkpointing = False
    with replay_routing(model, routing, weights="recorded"):
        loss = checkpoint(loss_of, model, ids, use_reentrant=False)
        with pytest.raises(RuntimeError, match="recomputed by a checkpoint that does not keep the routing"):
            loss.backward()
    with pytest.raises(ValueError, match=r"is \[5, 3, 2\], but has to be \[T, layers, K\] with 2 layers"):
        Routing.from_layers(model, [torch.zeros(5, 3, 2, dtype=torch.int64)])
    # Dense layers, of which an engine may give something too.
    model = model_of(num_hidden_layers=3, mlp_only_layers=[1])
    of_all = torch.arange(3).view(1, 3, 1).expand(4, 3, 2)
    for given, right in ((of_all, [0, 2]), (of_all[:, ::2].numpy(), [0, 2])):
        index = Routing.from_layers(model, [given]).index
        assert [int(each[0][0, 0]) for each in index.values()] == right


NOT_BY_TOPK = {"phimoe"}
"""Families whose routers choose one expert after the other."""
WEIGHS_SHARED = {"inkling_text"}
"""Families whose routers weigh the shared experts, too, which is not replayed."""
UNSEEN_IF_PLAIN = {"jetmoe", "llama4_text"}
REFUSED = {"nllb-moe", "switch_transformers"}


def _replays(family: str, model: nn.Module, changed: nn.Module, batch: dict[str, Tensor]) -> None:
    """What was recorded of `model` comes again in `changed`; today's weights are those of the recorded experts."""
    with record_routing(model) as routing:
        before = loss_of_family(family, model, batch)
    other = loss_of_family(family, changed, batch)
    assert other != before
    if family not in WEIGHS_SHARED:
        with replay_routing(changed, routing, weights="recorded"):
            again = loss_of_family(family, changed, batch)
        torch.testing.assert_close(again, before, rtol=1e-5, atol=1e-6)
    if family in NOT_BY_TOPK:
        replaying = replay_routing(changed, routing, weights="current")
        with pytest.raises(ValueError, match="not by one topk over them"), replaying:
            loss_of_family(family, changed, batch)
    else:
        with replay_routing(changed, routing, weights="current"), record_routing(changed) as current:
            loss_of_family(family, changed, batch)
        assert same_index(current, routing)
    # The router as it was weighs what it chose as it did.
    with replay_routing(model, routing, weights="current"):
        torch.testing.assert_close(loss_of_family(family, model, batch), before, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("family", [f for f in families() if f not in REFUSED | UNSEEN_IF_PLAIN])
def test_every_family(family: str) -> None:
    model = tiny_model(family).eval()
    changed = copy.deepcopy(model)
    disturb(changed)
    _replays(family, model, changed, tiny_batch(family, 0, tokens=32))


def _replays_in_parallel(family: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(tiny_model(family).eval())
        parallelize(models[-1], build_meshes(Layout.for_world(2, ep=2), "cpu"))
    disturb(models[1])
    _replays(family, *models, tiny_batch(family, dist.get_rank(), tokens=32))


@pytest.mark.more
@pytest.mark.parametrize("family", ["dbrx", "ernie4_5_vl_moe_text", "llama4_text", "longcat_flash"])
def test_families_with_adapters(ranks: RankPool, family: str) -> None:
    ranks.run(_replays_in_parallel, family, world=2)
