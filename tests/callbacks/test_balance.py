"""The callback that evens out the experts' load: what it counts and when it moves which bias, against one process."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_moe_ep import ExpertBiasCallback, MoEEPStrategy, remember_routing
from lightning_moe_ep.callbacks.balance import _add
from lightning_moe_ep.experts import choice_biases, find_experts
from tests.checkpoint import runs
from tests.dispatch.test_base import CountSyncs
from tests.experts.test_bias import Around, build_biased
from tests.models import ADAM_EPS, HIDDEN, OwnModel, build, loss_of, make_batch
from tests.oracle import reference_model
from tests.parity import Case, CaseModule, trainer, whole
from tests.pool import RankPool

RATE = 2**-9  # sums of it are exact
BIASED = {"choice_bias": True}
TWO = Case(model=BIASED, steps=3, tokens=((16,), (7,)))
FOUR = Case(model=BIASED, world=4, steps=3, tokens=((16, 5), (7, 8), (9, 0), (0, 3)))


class Initial(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state = whole(pl_module.model.state_dict())


def biases_of(module: nn.Module) -> list[Tensor]:
    return list(whole({bias.name: bias.tensor for bias in choice_biases(module)}).values())


def fit(module: L.LightningModule, strategy: Any, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    L.seed_everything(7, verbose=False)
    balance = ExpertBiasCallback(RATE)
    fitted = trainer(strategy, callbacks=[balance, *callbacks], **{"max_epochs": 1, **options})
    fitted.fit(module)
    assert balance._counter is None
    return fitted


def right_biases(case: Case, initial: dict[str, Tensor]) -> tuple[list[Tensor], list[float]]:
    """One process: the biases after training on all ranks' batches, and the worst imbalance of each step."""
    model = reference_model(case.kind, case.model, initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM_EPS)
    loads: list[Counter[int]] = []
    for found in find_experts(model):
        load: Counter[int] = Counter()
        loads.append(load)
        found.module.register_forward_pre_hook(lambda module, args, load=load: load.update(args[1].flatten().tolist()))
    imbalances = []
    for of_ranks in case.batches():
        count = len(of_ranks) * len(of_ranks[0])
        optimizer.zero_grad()
        for batch in (batch for batches in of_ranks for batch in batches):
            (loss_of(model, batch) / count).backward()
        optimizer.step()
        worst = 0.0
        for load, bias in zip(loads, choice_biases(model), strict=True):
            mean = sum(load.values()) / 8
            for expert in range(8):
                bias.tensor[expert] += RATE * ((load[expert] < mean) - (load[expert] > mean))
            worst = max(worst, max(load.values()) / mean)
            load.clear()
        imbalances.append(worst)
    return biases_of(model), imbalances


class Imbalance(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.values):
            self.values.append(float(trainer.callback_metrics["expert_imbalance"]))


def _trained(case: Case, strategy: str | None) -> tuple[dict[str, Tensor], list[Tensor], list[float]]:
    initial, imbalance = Initial(), Imbalance()
    module = CaseModule(case)
    chosen = strategy or MoEEPStrategy(ep=case.ep, replicate=case.replicate)
    fit(module, chosen, initial, imbalance, accumulate_grad_batches=len(case.tokens[0]))
    return initial.state, biases_of(module), imbalance.values


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (TWO, None),
        (FOUR, None),
        (Case(model=BIASED, ep=1, steps=3, tokens=((16,), (7,))), None),
        (Case(model=BIASED, ep=1, world=1, steps=3, tokens=((8, 9),)), None),
        (Case(model=BIASED, ep=2, world=4, replicate=2, steps=2), None),
        (TWO, "ddp"),
        (Case(model=BIASED, world=1, steps=3, tokens=((8, 9),)), "auto"),
    ],
    ids=["ep 2", "accumulation, ranks without tokens", "ep 1", "one rank", "replicas", "DDP", "plain"],
)
def test_is_that_of_one_process(ranks: RankPool, case: Case, strategy: str | None) -> None:
    results = ranks.run(_trained, case, strategy, world=case.world)
    right, imbalances = right_biases(case, results[0][0])
    assert any(bias.any() for bias in right)
    for _, biases, logged in results:
        assert len(biases) == 2
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(biases, right, strict=True))
        assert logged == pytest.approx(imbalances, rel=1e-6)


def _world_collectives() -> list[tuple[int, torch.dtype]]:
    seen = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((tensor.numel(), tensor.dtype))
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        fit(CaseModule(TWO), MoEEPStrategy(ep=2))
    return [shape for shape in seen if shape[0] == 16]


def test_one_collective_a_step_for_all_layers(ranks: RankPool) -> None:
    assert ranks.run(_world_collectives, world=2) == [[(16, torch.int64)] * 3] * 2


# What counts.


class Validated(CaseModule):
    """Validates after each batch; trains in eval mode, as one may."""

    def on_train_start(self) -> None:
        self.model.eval()

    def val_dataloader(self) -> DataLoader:
        return DataLoader([make_batch("own", 40, seed=99)], batch_size=None)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss_of(self.model, batch)


class Checkpointed(CaseModule):
    """Runs each block again in backward."""

    options: ClassVar[dict[str, Any]]

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            block.moe.forward = self._checkpointed(block.moe.forward)

    def _checkpointed(self, forward: Any) -> Any:
        return lambda hidden: checkpoint(forward, hidden, **self.options)


class Reentrant(Checkpointed):
    options: ClassVar[dict[str, Any]] = {"use_reentrant": True}


class NotReentrant(Checkpointed):
    options: ClassVar[dict[str, Any]] = {"use_reentrant": False}


class Remembering(Checkpointed):
    options: ClassVar[dict[str, Any]] = {"use_reentrant": False, "context_fn": remember_routing}


class Counted(L.Callback):
    """The loads of each layer that each step has counted on this rank."""

    def __init__(self) -> None:
        self.loads: list[list[int]] = []

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (balance,) = (callback for callback in trainer.callbacks if isinstance(callback, ExpertBiasCallback))
        self.loads.append(balance._counter.loads().tolist())


def _variant(kind: type[CaseModule]) -> list[list[int]]:
    counted = Counted()
    fit(kind(TWO), MoEEPStrategy(ep=2), counted, **({"val_check_interval": 1} if kind is Validated else {}))
    return counted.loads


@pytest.mark.parametrize("kind", [Validated, Reentrant, NotReentrant, Remembering])
def test_only_the_training_forwards_count_and_once(ranks: RankPool, kind: type[CaseModule]) -> None:
    plain = ranks.run(_variant, CaseModule, world=2)
    assert [[sum(loads) for loads in of_rank] for of_rank in plain] == [[2 * 2 * 16] * 3, [2 * 2 * 7] * 3]
    assert ranks.run(_variant, kind, world=2) == plain


class Manual(CaseModule):
    """Steps by itself: two optimizers after one forward, or one optimizer twice, each time after a forward."""

    def __init__(self, case: Case, twice: bool) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.twice = twice
        self.moved: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            if self.twice or not self.moved:
                self.manual_backward(loss_of(self.model, batch))
            optimizer.step()
            self.moved.append(max(float(bias.abs().max()) for bias in biases_of(self)) / RATE)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        named = list(self.named_parameters())
        split = len(named) // 2
        return [torch.optim.SGD([p for _, p in part], lr=0.0) for part in (named[:split], named[split:])]


def _manual(twice: bool) -> list[float]:
    module = Manual(Case(model=BIASED), twice)
    fit(module, MoEEPStrategy(ep=2))
    return module.moved


@pytest.mark.parametrize(("twice", "moved"), [(False, [1.0, 1.0]), (True, [1.0, 2.0])])
def test_manual_optimization(ranks: RankPool, twice: bool, moved: list[float]) -> None:
    assert ranks.run(_manual, twice, world=2) == [moved] * 2


def test_no_host_sync() -> None:
    logged: dict[str, Tensor] = {}
    model = OwnModel(choice_bias=True)
    module: Any = SimpleNamespace(log=lambda name, value: logged.update({name: value}))
    fake: Any = SimpleNamespace(world_size=1, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    callback = ExpertBiasCallback()
    callback.on_fit_start(fake, model)  # type: ignore[arg-type]
    callback.on_train_batch_start()
    with CountSyncs() as counter:
        for block in model.blocks:
            for hook in block.moe.experts._forward_pre_hooks.values():
                hook(block.moe.experts, (None, torch.randint(0, 8, (9, 2), device="cpu"), None), {})
        callback.on_before_optimizer_step(fake, module, None)  # type: ignore[arg-type]
    assert counter.syncs == []
    assert logged["expert_imbalance"] > 1
    assert all(bias.any() for bias in biases_of(model))


# Kinds of biases.


class Family(L.LightningModule):
    """A model of transformers at a fixed learning rate of 0, so that each step moves its biases by the same loads."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family

    def configure_model(self) -> None:
        self.model = build_biased(self.family)

    def train_dataloader(self) -> DataLoader:
        rank = dist.get_rank()
        return DataLoader([make_batch("qwen3_moe", 64, seed=rank)] * 4, batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


def _family(family: str, options: dict[str, Any], precision: Any) -> tuple[list[Tensor], list[Tensor], list[str]]:
    initial = Initial()
    module = Family(family)
    fit(module, MoEEPStrategy(ep=2, **options), initial, precision=precision, max_steps=1)
    biases = choice_biases(module)
    kinds = [f"{type(bias.tensor).__name__} {bias.tensor.dtype}" for bias in biases]
    before = [initial.state[bias.name.removeprefix("model.")] for bias in biases]
    return before, biases_of(module), kinds


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("ernie4_5_moe", {}), ("ernie4_5_moe", {"init_on_meta": True}), ("minimax_m2", {"init_on_meta": True})],
    ids=["a parameter", "a parameter made on the meta device", "a buffer made in the default dtype"],
)
def test_is_whole_and_in_fp32(ranks: RankPool, family: str, options: dict[str, Any], precision: str) -> None:
    kind = "Parameter" if family == "ernie4_5_moe" else "Tensor"
    results = ranks.run(_family, family, options, precision, world=2)
    for before, after, kinds in results:
        assert kinds == [f"{kind} torch.float32"] * 2
        for one, other, theirs in zip(before, after, results[0][1], strict=True):
            assert not one.any()
            assert set(other.abs().flatten().tolist()) <= {0.0, RATE}
            assert other.any()
            assert torch.equal(other, theirs)


def _count_in(load: Tensor, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
    load += torch.bincount(args[1].flatten(), minlength=8)


def _routed_by_one_process(family: str, state: dict[str, Tensor]) -> list[Tensor]:
    model = build_biased(family)
    model.set_experts_implementation("eager")
    model.load_state_dict(state)
    loads = []
    for found in find_experts(model):
        load = torch.zeros(8)
        loads.append(load)
        found.module.register_forward_pre_hook(partial(_count_in, load))
    for rank in (0, 1):
        model(**make_batch("qwen3_moe", 64, seed=rank))
    return [RATE * (load.mean() - load).sign() for load in loads]


def _family_state(family: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    initial = Initial()
    module = Family(family)
    fit(module, MoEEPStrategy(ep=2), initial, max_steps=1)
    return initial.state, biases_of(module)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "deepseek_v3", "lfm2_moe"])
def test_of_transformers(ranks: RankPool, family: str) -> None:
    for state, biases in ranks.run(_family_state, family, world=2):
        for ours, right in zip(biases, _routed_by_one_process(family, state), strict=True):
            assert torch.equal(ours.flatten(), right)


class UserSharded(Family):
    """Sharded by the user, with Lightning's own strategy: FSDP2 makes the bias a DTensor."""

    def configure_model(self) -> None:
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def _user_sharded() -> tuple[dict[str, Tensor], list[Tensor], bool]:
    initial = Initial()
    module = UserSharded("ernie4_5_moe")
    fit(module, ModelParallelStrategy(), initial, max_steps=1)
    sharded = all(isinstance(bias.tensor, DTensor) for bias in choice_biases(module))
    return initial.state, biases_of(module), sharded


def test_a_bias_that_fsdp2_shards(ranks: RankPool) -> None:
    for state, biases, sharded in ranks.run(_user_sharded, world=2):
        assert sharded
        for ours, right in zip(biases, _routed_by_one_process("ernie4_5_moe", state), strict=True):
            assert torch.equal(ours.flatten(), right)


def _sharded_add(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    whole_bias, step = torch.arange(8.0).view(shape), torch.arange(8.0).view(shape) ** 2
    bias = distribute_tensor(whole_bias, mesh["shard"], [Shard(0)])
    _add(bias, step)
    return bias.full_tensor(), whole_bias + step


@pytest.mark.parametrize("shape", [(8,), (1, 8)], ids=["[E]", "[1, E]: one rank has all"])
def test_each_rank_adds_its_own_part(ranks: RankPool, shape: tuple[int, ...]) -> None:
    for ours, right in ranks.run(_sharded_add, shape, world=6):
        assert torch.equal(ours, right)


# Resuming.


@pytest.mark.parametrize("form", runs.FORMS)
@pytest.mark.parametrize("to", [runs.EP2, runs.FSDP], ids=str)
def test_resuming_equals_not_stopping(ranks: RankPool, tmp_path: Path, form: str, to: runs.At) -> None:
    def of(at: runs.At, **options: Any) -> runs.Run:
        return runs.Run(at, form, model=runs.WITH_BIAS, options={"callbacks": [ExpertBiasCallback(RATE)]}, **options)

    straight = runs.on(ranks, of(runs.EP2, max_steps=2 * runs.N))
    path = str(tmp_path / "c.ckpt")
    before = runs.on(ranks, of(runs.EP2, save=path))[0]
    resumed = runs.on(ranks, of(to, max_steps=2 * runs.N, resume=path))
    names = [name for name in straight[0].weights if name.endswith("choice_bias")]
    assert len(names) == 2
    for ours, right in zip(resumed, straight, strict=True):
        for name in names:
            assert before.weights[name].any()
            assert not torch.equal(before.weights[name], right.weights[name])
            assert torch.equal(ours.weights[name], right.weights[name])


def _resumed_parameter(path: str, resume: bool, max_steps: int) -> list[Tensor]:
    module = Family("ernie4_5_moe")
    L.seed_everything(7, verbose=False)
    fitted = trainer(MoEEPStrategy(ep=2), max_steps=max_steps, callbacks=[ExpertBiasCallback(RATE)])
    fitted.fit(module, ckpt_path=path if resume else None)
    if not resume:
        fitted.save_checkpoint(path)
    return biases_of(module)


def test_resuming_a_parameter(ranks: RankPool, tmp_path: Path) -> None:
    straight = ranks.run(_resumed_parameter, str(tmp_path / "straight"), False, 4, world=2)
    ranks.run(_resumed_parameter, str(tmp_path / "c.ckpt"), False, 2, world=2)
    resumed = ranks.run(_resumed_parameter, str(tmp_path / "c.ckpt"), True, 4, world=2)
    assert max(float(bias.max()) for bias in straight[0]) > 2 * RATE
    for ours, right in zip(resumed, straight, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


# Does it work?


class Skewed(CaseModule):
    """All tokens share a direction that the router is fond of, for two of the experts."""

    def configure_model(self) -> None:
        self.model = OwnModel(choice_bias=True)
        for block in self.model.blocks:
            block.norm.bias.data.fill_(1.0)
            block.moe.router.weight.data[:2] += 1.5 / HIDDEN

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _skewed(rate: float) -> list[float]:
    L.seed_everything(7, verbose=False)
    imbalance = Imbalance()
    case = Case(steps=40, tokens=((256,),))
    trainer(max_epochs=1, callbacks=[ExpertBiasCallback(rate), imbalance]).fit(Skewed(case))
    return imbalance.values


def test_evens_out_a_skewed_router(ranks: RankPool) -> None:
    (without, _), (with_it, _) = (ranks.run(_skewed, rate, world=2) for rate in (0.0, 0.01))
    assert without[0] == with_it[0] > 2.5
    assert min(without) > 2.5
    assert sum(with_it[-10:]) / 10 < 1.5


# Refusals.


def _refused(make: str, options: dict[str, Any]) -> str:
    module = L.LightningModule()
    module.model = {"qwen3_moe": lambda: build("qwen3_moe"), "own": OwnModel, "linear": lambda: nn.Linear(2, 2)}[make]()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    module.training_step = lambda batch, batch_idx: pytest.fail("it trains")
    module.train_dataloader = lambda: [0]
    with pytest.raises(ValueError) as error:
        trainer(MoEEPStrategy(ep=1), max_steps=1, callbacks=[ExpertBiasCallback(**options)]).fit(module)
    return str(error.value)


def test_a_model_without_one_is_refused_on_every_rank(ranks: RankPool) -> None:
    messages = ranks.run(_refused, "qwen3_moe", {}, world=2)
    assert messages[0].startswith(
        "no router of this model has a bias that it chooses experts by: there is none around"
        " model.model.layers.0.mlp.experts. It would be a floating buffer, or a parameter with requires_grad=False, of"
        ' one element for each of the 8 experts, with "bias" in its name (but more than that). If it is called'
    )
    assert "MoELayer has one with choice_bias=True" in messages[0]
    assert messages[1] == messages[0]
    (message,) = ranks.run(_refused, "own", {"bias_name": "nudge"}, world=1)
    assert "named 'nudge'. If it is called something else, give ExpertBiasCallback(bias_name=...)" in message


def _start(model: nn.Module, **options: Any) -> ExpertBiasCallback:
    fake: Any = SimpleNamespace(world_size=1, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    callback = ExpertBiasCallback(**options)
    callback.on_fit_start(fake, model)  # type: ignore[arg-type]
    return callback


def test_what_cannot_be_told_apart_is_refused() -> None:
    model = Around(choice_bias=torch.zeros(8), old_bias=torch.zeros(8))
    with pytest.raises(ValueError, match=r"2 tensors may be the bias .* of experts .*: choice_bias, old_bias; say"):
        _start(model)
    _start(model, bias_name="old_bias")


def test_what_is_not_saved_is_refused() -> None:
    model = Around()
    model.register_buffer("choice_bias", torch.zeros(8), persistent=False)
    with pytest.raises(ValueError, match=r"the bias choice_bias is a buffer that no checkpoint holds \(persistent=Fal"):
        _start(model)


def test_bf16_is_refused() -> None:
    model = Around(choice_bias=torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"the bias choice_bias is in torch.bfloat16, in which small updates are lost"):
        _start(model)


def test_layers_without_one_are_named() -> None:
    model = nn.ModuleList([Around(), Around(choice_bias=torch.zeros(8))])
    with pytest.warns(UserWarning, match=r"1 of 2 experts modules, 0.experts first, are not balanced"):
        _start(model)


@pytest.mark.parametrize("rate", [-0.1, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"must be 0 or more, such as 0\.001"):
        ExpertBiasCallback(rate)
