"""One seed, one model, whatever the layout; built for real or on the meta device."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy, initialization, materialize
from lightning_moe_ep.initialization import make_replicas_equal, seeded
from tests.models import build, loss_of, make_batch
from tests.parity import Case, CaseModule, trainer, whole
from tests.pool import RankError, RankPool

CPU = torch.device("cpu")
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]


class Noise(nn.Module):
    """A buffer that is drawn at random, by `reset_parameters`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.values.normal_()


class Module(L.LightningModule):
    """Trains one step at a learning rate of `lr`."""

    def __init__(self, kind: str, lr: float, **options: Any) -> None:
        super().__init__()
        self.kind, self.lr, self.options = kind, lr, options

    def configure_model(self) -> None:
        self.model = build(self.kind, **self.options)
        if self.kind == "own":
            self.model.noise = Noise(4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader([make_batch(self.kind, 8, seed=dist.get_rank())], batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return whole({**dict(model.named_parameters()), **dict(model.named_buffers())})


def _initial(kind: str, ep: int, meta: bool, seed: int = 3) -> dict[str, Tensor]:
    """The whole initial weights and buffers, as a fit that changes nothing leaves them."""
    L.seed_everything(seed, verbose=False)
    module = Module(kind, lr=0.0)
    trainer(MoEEPStrategy(ep=ep, init_on_meta=meta), max_steps=1).fit(module)
    return _tensors(module.model)


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("kind", ["own", "qwen3_moe"])
def test_same_seed_gives_the_same_model_at_every_layout(ranks: RankPool, kind: str, meta: bool) -> None:
    first: dict[str, Tensor] = {}
    for world, ep in LAYOUTS:
        for tensors in ranks.run(_initial, kind, ep, meta, world=world):
            first = first or tensors
            assert tensors.keys() == first.keys()
            differing = [name for name in first if not torch.equal(tensors[name], first[name])]
            assert not differing, f"world {world}, ep {ep}: {differing}"
    experts = {name: tensor for name, tensor in first.items() if name.endswith(("gate_up_proj", "down_proj"))}
    assert len(experts) == 4
    for name, stacked in experts.items():
        distinct = torch.stack([expert.flatten() for expert in stacked]).unique(dim=0)
        assert len(distinct) == 8, f"experts of {name} start equal"
    flat = [stacked.flatten()[:100] for stacked in experts.values()]
    assert len(torch.stack(flat).unique(dim=0)) == 4, "layers start equal"
    other = ranks.run(_initial, kind, 1, meta, 4, world=1)[0]
    assert not torch.equal(other[next(iter(experts))], first[next(iter(experts))]), "the seed plays no part"


@pytest.mark.parametrize("kind", ["own", "qwen3_moe"])
def test_meta_draws_from_the_distributions_of_a_real_model(ranks: RankPool, kind: str) -> None:
    real = ranks.run(_initial, kind, 2, False, world=2)[0]
    meta = ranks.run(_initial, kind, 2, True, world=2)[0]
    assert real.keys() == meta.keys()
    for name, tensor in real.items():
        assert tensor.dtype == meta[name].dtype
        if tensor.numel() >= 1000:
            assert float(meta[name].std()) == pytest.approx(float(tensor.std()), rel=0.1), name
            assert float(meta[name].mean()) == pytest.approx(float(tensor.mean()), abs=0.1 * float(tensor.std())), name
        elif tensor.unique().numel() <= 1:  # norms and biases
            assert torch.equal(tensor, meta[name]), name


def test_rotary_buffers_equal_those_of_a_real_model(ranks: RankPool) -> None:
    meta = ranks.run(_initial, "qwen3_moe", 2, True, world=2)[0]
    buffers = dict(build("qwen3_moe").named_buffers())
    assert [name for name in buffers if "inv_freq" in name]
    for name, buffer in buffers.items():
        assert torch.equal(meta[name], buffer), name


def _tied(meta: bool) -> tuple[bool, bool, float]:
    """That the embeddings are one parameter after a step, that they moved, and the padding row's largest value."""
    L.seed_everything(3, verbose=False)
    module = Module("qwen3_moe", lr=1.0, tie_word_embeddings=True, pad_token_id=5)
    before: dict[str, Tensor] = {}

    class Keep(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            before.update(whole(dict(module.model.named_parameters())))

    trainer(MoEEPStrategy(ep=2, init_on_meta=meta), max_steps=1, callbacks=[Keep()]).fit(module)
    model = module.model
    embedding = model.get_input_embeddings().weight
    after = embedding.full_tensor()
    name = "model.embed_tokens.weight"
    return (
        embedding is model.get_output_embeddings().weight,
        not torch.equal(after, before[name]),
        float(before[name][5].abs().max()),
    )


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_tied_embeddings_stay_tied_and_padding_is_zero(ranks: RankPool, meta: bool) -> None:
    for tied, moved, padding in ranks.run(_tied, meta, world=2):
        assert tied and moved
        assert padding == 0


class FilledInConstructor(nn.Module):
    """Its parameter is filled where no replay can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class HalfReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight[:3] = 1


class IntegerBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(4))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (FilledInConstructor, "inner.scale (FilledInConstructor)"),
        (HalfReset, "inner.weight (HalfReset)"),
        (IntegerBuffer, "inner.ids (IntegerBuffer)"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(make: type[nn.Module], name: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"linear": nn.Linear(2, 2), "inner": make()})
    with pytest.raises(ValueError) as error:
        materialize(model, seed=0, device=CPU)
    message = str(error.value)
    assert message.startswith(f"the initial value of {name} cannot be replayed")
    assert f"Build the model for real instead of on the meta device, or give {make.__name__} a" in message
    assert model["inner"].state_dict().popitem()[1].is_meta, "what was refused must be left as it was"


def test_what_is_real_already_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    kept = model[0].weight
    values = kept.detach().clone()
    materialize(model, seed=0, device=CPU)
    assert model[0].weight is kept and torch.equal(kept, values)
    assert not model[1].weight.is_meta and model[1].weight.detach().abs().max() > 0


def test_an_embedding_of_torch_keeps_its_padding_row() -> None:
    model = nn.Embedding(5, 3, padding_idx=2, device="meta")
    materialize(model, seed=0, device=CPU)
    assert model.weight[2].abs().max() == 0 and model.weight[1].abs().min() > 0


def test_frozen_stays_frozen() -> None:
    model = nn.Linear(2, 2, device="meta").requires_grad_(False)
    materialize(model, seed=0, device=CPU)
    assert not model.weight.requires_grad


def test_seeded_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with seeded(1, CPU):
        first = torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(torch.randn(3), first)


def _unequal(what: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.BatchNorm1d(3)
    if dist.get_rank() == 1 and what == "buffer":
        model.running_mean += 1
    if dist.get_rank() == 1 and what == "order":
        model.weight.data[:] = torch.tensor([0.0, 2.0, 1.0])
    if dist.get_rank() == 0 and what == "order":
        model.weight.data[:] = torch.tensor([1.0, 0.0, 2.0])
    if dist.get_rank() == 1 and what == "shape":
        model = nn.BatchNorm1d(4)
    differing = make_replicas_equal(model, device=torch.device("cpu"))
    return [*differing, model.running_mean.tolist(), model.weight.tolist()]


def test_replicas_take_rank_0s_values(ranks: RankPool) -> None:
    assert ranks.run(_unequal, "buffer", world=2) == [["running_mean", [0.0] * 3, [1.0] * 3]] * 2
    assert ranks.run(_unequal, "nothing", world=2) == [[[0.0] * 3, [1.0] * 3]] * 2


def test_replicas_of_the_same_values_in_another_order(ranks: RankPool) -> None:
    assert ranks.run(_unequal, "order", world=2) == [["weight", [0.0] * 3, [1.0, 0.0, 2.0]]] * 2


def test_replicas_of_other_structure_are_refused_on_every_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(_unequal, "shape", world=2)
    message = "rank(s) [1] built a model of other parameter names, shapes or dtypes than rank 0"
    assert str(error.value).count(message) == 2


def _whole_parameters_at_once() -> int:
    """On a rank: how many whole parameters, beside the shards, are alive when the next one is made, at most."""
    refs: list[weakref.ref[Tensor]] = []
    alive = []
    original = initialization._initial_value

    def watched(modules: Any, owner: str, kind: str, key: str, tensor: Tensor, **options: Any) -> Tensor | None:
        alive.append(sum(ref() is not None for ref in refs))
        value = original(modules, owner, kind, key, tensor, **options)
        if isinstance(tensor, DTensor) and value is not None:
            refs.append(weakref.ref(value))
        return value

    with patch.object(initialization, "_initial_value", watched):
        trainer(MoEEPStrategy(ep=2, init_on_meta=True), max_steps=1).fit(CaseModule(Case()))
    assert len(refs) > 10
    return max(alive)


def test_one_whole_parameter_at_a_time(ranks: RankPool) -> None:
    assert ranks.run(_whole_parameters_at_once, world=2) == [0, 0]
