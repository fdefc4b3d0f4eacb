"""The strategy under real Trainers: its names and options, how models are built, and what it does with them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe_ep import GroupedExperts, MoEEPStrategy, parallelize
from lightning_moe_ep.experts import NoExpertsError, expert_parameters, spread_experts
from tests.contract import contract
from tests.models import ADAM_EPS, HIDDEN, Block, OwnModel, build, loss_of, make_batch
from tests.oracle import answer, reference_model
from tests.parity import Case, CaseModule, Probe, trainer, whole, worst
from tests.pool import RankPool

ALIASES = {"moe_ep": "auto", **{f"moe_ep_{2**power}": 2**power for power in range(7)}}


# Names and options.


@pytest.mark.parametrize("alias", ALIASES)
def test_alias(alias: str) -> None:
    ep = ALIASES[alias]
    devices = 2 if ep == "auto" else 2 * ep
    strategy = L.Trainer(accelerator="cpu", devices=devices, strategy=alias, logger=False).strategy
    assert isinstance(strategy, MoEEPStrategy)
    assert strategy.ep == ep


def test_alias_checks_the_world() -> None:
    with pytest.raises(ValueError, match=r"ep=8 is larger than the world of 2 rank\(s\)"):
        L.Trainer(accelerator="cpu", devices=2, strategy="moe_ep_8", logger=False)


def _parse(**options: Any) -> MoEEPStrategy:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    config = {"strategy": {"class_path": "lightning_moe_ep.MoEEPStrategy", "init_args": options}}
    return parser.instantiate_classes(parser.parse_object(config)).strategy


def test_options_from_a_config() -> None:
    assert _parse().ep == "auto"
    assert _parse(ep="auto").ep == "auto"
    strategy = _parse(
        ep=2, replicate=3, combine_dtype="input", computation="loop", init_on_meta=True, timeout="0:05:00"
    )
    assert (strategy.ep, strategy.replicate, strategy.init_on_meta) == (2, 3, True)
    assert strategy.parallelize_options["combine_dtype"] == "input"
    assert strategy.parallelize_options["computation"] == "loop"
    assert strategy._timeout == timedelta(minutes=5)


@pytest.mark.parametrize(
    "options",
    [
        {"epp": 2},
        {"ep": "all"},
        {"ep": 1.5},
        {"replicate": "two"},
        {"combine_dtype": "bfloat16"},
        {"computation": "fast"},
        {"init_on_meta": "perhaps"},
        {"timeout": "soon"},
        {"uneven": "perhaps"},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_config_is_checked_when_it_is_parsed(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        _parse(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep": 0}, "ep=0 must be a positive number of ranks, or 'auto'"),
        ({"ep": "all"}, "ep='all' must be a positive number of ranks, or 'auto'"),
        ({"ep": 2.0}, "ep=2.0 must be a positive number of ranks, or 'auto'"),
        ({"ep": True}, "ep=True must be a positive number of ranks, or 'auto'"),
        ({"replicate": 0}, "replicate=0 must be a number of copies, at least 1"),
        ({"replicate": 2.0}, "replicate=2.0 must be a number of copies, at least 1"),
        (
            {"computation": "lop"},
            r"computation='lop' is not known; use one of \['auto', 'grouped_mm', 'loop', 'native'\]",
        ),
        ({"combine_dtype": torch.float32}, "combine_dtype=torch.float32 is not known; use one of .*'float32'"),
        ({"dispatcher": "pigeon"}, r"no dispatcher is named 'pigeon'; use one of \['all_gather'"),
    ],
    ids=str,
)
def test_refused_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEEPStrategy(**options)


# Building the model.


def _fit(module: L.LightningModule, *callbacks: L.Callback, strategy: Any = None, seed: int | None = 7, **options: Any):
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    fitting = trainer(strategy or MoEEPStrategy(ep=2), callbacks=list(callbacks), **{"max_epochs": 1, **options})
    fitting.fit(module)
    return fitting


def _auto(num_experts: int) -> tuple[int, int, str]:
    fitted = _fit(CaseModule(Case(model={"num_experts": num_experts}, world=4)), strategy=MoEEPStrategy())
    (spread, *_) = (spread for _, spread in spread_experts(fitted.lightning_module))
    return spread.ep, spread.num_local, str(fitted.strategy.layout)


@pytest.mark.parametrize(
    ("world", "num_experts", "ep"),
    [(2, 8, 2), (2, 6, 2), (2, 5, 1), (4, 8, 4), (4, 6, 2), (4, 5, 1)],
)
def test_auto_picks_the_largest_ep_that_fits(ranks: RankPool, world: int, num_experts: int, ep: int) -> None:
    layout = f"(replicate 1, efsdp {world // ep}, ep {ep})"
    assert ranks.run(_auto, num_experts, world=world) == [(ep, num_experts // ep, layout)] * world


class AsksForMeshes(CaseModule):
    """Parallelizes by itself."""

    def configure_model(self) -> None:
        super().configure_model()
        parallelize(self.model, self.trainer.strategy.meshes, computation="loop", reshard_after_forward=False)


def _auto_meshes() -> str:
    with pytest.raises(RuntimeError) as error:
        _fit(AsksForMeshes(Case()), strategy=MoEEPStrategy())
    return str(error.value)


def test_meshes_are_not_there_yet_with_auto(ranks: RankPool) -> None:
    message = (
        "there are no meshes yet: with ep='auto' they are built once `configure_model` has returned, so give ep as a"
        " number to call `parallelize` there"
    )
    assert ranks.run(_auto_meshes, world=2) == [message] * 2


def test_meshes_are_not_there_before_processes() -> None:
    with pytest.raises(RuntimeError, match="there are no meshes before the processes are set up"):
        _ = MoEEPStrategy(ep=2).meshes


def _own_parallelize() -> tuple[dict[str, Tensor], list[dict[str, Tensor]], bool]:
    module, probe = AsksForMeshes(Case(world=4)), Probe()
    _fit(module, probe)
    roots = [name for name, child in module.named_children() if isinstance(child, FSDPModule)]
    return probe.initial, probe.gradients, roots == ["model"]


def test_module_that_parallelizes_by_itself_is_left_as_it_is(ranks: RankPool) -> None:
    initial, gradients, one_root = ranks.run(_own_parallelize, world=4)[0]
    assert one_root
    right = _oracle(Case(world=4), initial)
    error, name = worst(gradients[0], right)
    assert error < 1e-5, name


def _oracle(case: Case, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    return answer(case.kind, case.model, initial, case.batches()).gradients[0]


class Dense(L.LightningModule):
    def configure_model(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1))
        self.stacked = Stacked()


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def _no_experts(ep: Any) -> str:
    module = Dense()
    module.train_dataloader = CaseModule(Case()).train_dataloader
    module.training_step = lambda batch: None
    module.configure_optimizers = lambda: None
    with pytest.raises(NoExpertsError) as error:
        _fit(module, strategy=MoEEPStrategy(ep=ep))
    return str(error.value)


@pytest.mark.parametrize("ep", [2, "auto"])
def test_model_without_experts_names_what_came_near(ranks: RankPool, ep: Any) -> None:
    for message in ranks.run(_no_experts, ep, world=2):
        assert message.startswith("this model has no experts module; plain FSDP2 (ModelParallelStrategy) or DDP is")
        assert message.endswith(
            "stacked (Stacked): it is called with (hidden), not with (hidden, top_k_index, top_k_weights)"
        )


class BuiltInInit(CaseModule):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = build(case.kind, **case.model)

    def configure_model(self) -> None:
        pass


@contextmanager
def _recorded_warnings() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught]


def _built_in_init(seed: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]], list[str]]:
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    module, probe = BuiltInInit(Case()), Probe()
    drawn = {name: parameter.detach().clone() for name, parameter in module.model.named_parameters()}
    with _recorded_warnings() as messages:
        _fit(module, probe, seed=None)
    assert expert_parameters(module), "the model was not parallelized"
    return drawn, probe.initial, probe.gradients, [message for message in messages if "differed" in message]


def test_model_built_in_init(ranks: RankPool) -> None:
    for drawn, initial, gradients, messages in ranks.run(_built_in_init, 7, world=2):
        assert worst(initial, drawn)[0] == 0 and not messages
        assert worst(gradients[0], _oracle(Case(), initial))[0] < 1e-5


def test_model_built_in_init_without_a_seed_is_rank_0s_everywhere(ranks: RankPool) -> None:
    (drawn, first, gradients, messages), (others, second, _, _) = ranks.run(_built_in_init, None, world=2)
    assert not torch.equal(drawn["head.weight"], others["head.weight"]), "the ranks should have drawn unlike weights"
    assert worst(first, drawn)[0] == 0 and worst(second, drawn)[0] == 0
    assert worst(gradients[0], _oracle(Case(), first))[0] < 1e-5
    # Norms and biases start at constants, the rest is drawn.
    (message,) = messages
    assert "parameter(s) and buffer(s) differed between ranks, model.blocks.0." in message
    assert message.endswith("Call seed_everything, or build the model in configure_model, to avoid it")


class KeepsRandomState(CaseModule):
    def on_fit_start(self) -> None:
        self.state = torch.get_rng_state()


def _unseeded(meta: bool) -> tuple[list[Tensor], bool, float]:
    """This rank's own shards, that its random state is untouched, and what it draws next."""
    before = torch.get_rng_state()
    module = KeepsRandomState(Case(world=4))
    strategy = MoEEPStrategy(ep=2, replicate=2, init_on_meta=meta)
    with _recorded_warnings() as messages:
        _fit(module, strategy=strategy, seed=None, limit_train_batches=0)
    assert not [message for message in messages if "differed" in message]
    local = [p._local_tensor.clone() for p in module.model.parameters() if isinstance(p, DTensor)]
    torch.set_rng_state(module.state)
    return local, torch.equal(before, module.state), float(torch.rand(()))


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_replicas_are_equal_without_a_seed_and_ranks_draw_their_own_numbers(ranks: RankPool, meta: bool) -> None:
    found = ranks.run(_unseeded, meta, world=4)
    for one, other in ((0, 2), (1, 3)):
        for ours, theirs in zip(found[one][0], found[other][0], strict=True):
            assert torch.equal(ours, theirs)
    assert all(untouched for _, untouched, _ in found)
    assert len({draw for _, _, draw in found}) == 4


class Shared(CaseModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.other = nn.Linear(HIDDEN, HIDDEN)
        self.other.weight = self.model.head.weight


def _shared() -> str:
    with pytest.raises(ValueError) as error:
        _fit(Shared(Case()))
    return str(error.value)


def test_parameter_of_two_roots_is_refused(ranks: RankPool) -> None:
    message = (
        "model.head.weight and other.weight are one parameter, but in modules that FSDP2 shards apart; put both under"
        " one module with a forward of its own, or untie them"
    )
    assert ranks.run(_shared, world=2) == [message] * 2


class LayersOnTheModule(CaseModule):
    """The layers are a ModuleList of the LightningModule itself, which cannot be an FSDP2 root."""

    def configure_model(self) -> None:
        moe = {"num_experts": 8, "top_k": 2, "intermediate_size": 48}
        self.blocks = nn.ModuleList([Block(**moe), Block(**moe)])
        self.head = nn.Linear(HIDDEN, HIDDEN)

    @property
    def model(self) -> Any:
        return _AsOwnModel(self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        # A block's weights are sharded again between forward and backward.
        assert all(isinstance(parameter, DTensor) for parameter in self.blocks.parameters())
        return loss


class _AsOwnModel:
    """Looks like an `OwnModel` with the layers of a LightningModule."""

    def __init__(self, module: LayersOnTheModule) -> None:
        self.blocks, self.head = module.blocks, module.head
        self.named_parameters, self.named_modules = module.named_parameters, module.named_modules

    def __call__(self, x: Tensor) -> Tensor:
        return OwnModel.forward(self, x)  # type: ignore[arg-type]


def _layers_on_the_module(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], bool]:
    module, probe = LayersOnTheModule(case), Probe()
    _fit(module, probe)
    return probe.initial, probe.gradients, all(isinstance(p, DTensor) for p in module.parameters())


def test_layers_in_a_list_on_the_module(ranks: RankPool) -> None:
    case = Case(world=4, tokens=((16,), (3,), (0,), (8,)))
    initial, gradients, sharded = ranks.run(_layers_on_the_module, case, world=4)[0]
    assert sharded
    error, name = worst(gradients[0], _oracle(case, initial))
    assert error < 1e-5, name


# Running again.


class Counts(CaseModule):
    """Counts how often a model is built; validates on the training data."""

    built = 0

    def configure_model(self) -> None:
        super().configure_model()
        self.built += 1

    val_dataloader = CaseModule.train_dataloader

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.model, batch), sync_dist=True)


def _fit_validate_fit() -> list[Any]:
    module = Counts(Case(steps=2))
    fitting = _fit(module, num_sanity_val_steps=0)
    after_one = whole(dict(module.model.named_parameters()))
    (again,) = fitting.validate(module, verbose=False)
    unchanged = worst(whole(dict(module.model.named_parameters())), after_one)[0] == 0
    same_loss = again["val_loss"] == float(fitting.callback_metrics["val_loss"])
    fitting.fit_loop.max_epochs = 2
    fitting.fit(module)
    after_two = whole(dict(module.model.named_parameters()))
    straight = Counts(Case(steps=2))
    _fit(straight, max_epochs=2, num_sanity_val_steps=0)
    return [module.built, unchanged, same_loss, after_one, after_two, whole(dict(straight.model.named_parameters()))]


def test_fit_validate_fit_loses_nothing(ranks: RankPool) -> None:
    built, unchanged, same_loss, after_one, after_two, straight = ranks.run(_fit_validate_fit, world=2)[0]
    assert built == 1 and unchanged and same_loss
    moved = worst(after_two, after_one)[0]
    assert moved > 1e-4, "the second fit changed nothing"
    # The second fit starts a new optimizer, so it is near the uninterrupted run, but not equal to it.
    assert worst(after_two, straight)[0] < moved


def _validate_then_fit() -> bool:
    module = Counts(Case())
    fitting = trainer(MoEEPStrategy(ep=2), max_epochs=1)
    # Lightning evaluates in inference mode on all backends but gloo.
    with patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False):
        fitting.validate(module, verbose=False)
        fitting.fit(module)
    return fitting.global_step == 1


def test_fit_after_validating_in_inference_mode(ranks: RankPool) -> None:
    assert all(ranks.run(_validate_then_fit, world=2))


def _second_trainer(first: int, second: Any) -> tuple[str | None, bool]:
    """The error of fitting a module of ep=`first` by a strategy of ep=`second`, and that its weights are kept."""
    module = CaseModule(Case())
    _fit(module, strategy=MoEEPStrategy(ep=first))
    weights = whole(dict(module.model.named_parameters()))
    try:
        trainer(MoEEPStrategy(ep=second), max_epochs=1, limit_train_batches=0).fit(module)
        error = None
    except ValueError as refused:
        error = str(refused)
    return error, worst(whole(dict(module.model.named_parameters())), weights)[0] == 0


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_another_ep_is_refused(ranks: RankPool, first: int, second: int) -> None:
    message = (
        f"the experts of model.blocks.0.moe.experts are spread over ep={first} already, but this strategy has"
        f" ep={second}; use the same ep, or build the model anew and load a checkpoint"
    )
    assert ranks.run(_second_trainer, first, second, world=2) == [(message, True)] * 2


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, "auto"), (1, "auto")])
def test_the_same_ep_goes_on(ranks: RankPool, first: int, second: Any) -> None:
    assert ranks.run(_second_trainer, first, second, world=2) == [(None, True)] * 2


def _plain_trainer() -> tuple[Any, bool, int]:
    dist.destroy_process_group()  # as in a notebook: nothing is set up
    module = Notebook(Case(world=1))
    plain = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=MoEEPStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    plain.fit(module)
    moved = [
        name for name, p in module.model.named_parameters() if not torch.equal(p.full_tensor(), module.before[name])
    ]
    return plain.strategy.launcher.is_interactive_compatible, len(moved) == len(module.before), plain.global_step


class Notebook(CaseModule):
    def on_train_start(self) -> None:
        self.before = whole(dict(self.model.named_parameters()))


@contract("Launch", "`devices=1`", "works, in the process itself")
def test_one_device_runs_in_process(ranks: RankPool) -> None:
    assert ranks.run(_plain_trainer, world=1) == [(True, True, 1)]


# Data.


class Ids(CaseModule):
    def __init__(self) -> None:
        super().__init__(Case())
        self.seen: list[int] = []

    def train_dataloader(self) -> DataLoader:
        rows = [{"id": number, **make_batch("own", 1, seed=number)} for number in range(24)]
        return DataLoader(rows, batch_size=3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen += batch.pop("id").tolist()
        return loss_of(self.model, batch)


def _ids() -> list[int]:
    module = Ids()
    _fit(module, strategy=MoEEPStrategy(ep=2), use_distributed_sampler=True)
    return module.seen


def test_every_rank_of_the_world_gets_other_data(ranks: RankPool) -> None:
    seen = ranks.run(_ids, world=4)
    assert [len(of_rank) for of_rank in seen] == [6] * 4
    assert sorted(number for of_rank in seen for number in of_rank) == list(range(24))


# Parameters that nothing shards, frozen ones, and ep=1.


class Scaled(CaseModule):
    """A parameter that sits on the LightningModule itself; each rank draws another one."""

    def __init__(self, case: Case, by_hand: bool) -> None:
        super().__init__(case)
        self.by_hand = by_hand

    def configure_model(self) -> None:
        super().configure_model()
        self.scale = nn.Parameter(1 + torch.rand(HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank())))
        self.unused = nn.Parameter(torch.ones(2))
        if self.by_hand:
            parallelize(self.model, self.trainer.strategy.meshes)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return _scaled_loss(self.model, self.scale, batch)

    def on_train_start(self) -> None:
        self.first_scale = self.scale.detach().clone()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scale_gradient = self.scale.grad.clone()
        assert self.unused.grad.tolist() == [0.0, 0.0]


def _scaled_loss(model: nn.Module, scale: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return loss_of(lambda x: model(x) * scale, batch)  # type: ignore[arg-type]


def _scaled(case: Case, mode: str) -> dict[str, Any]:
    module, probe = Scaled(case, by_hand=mode == "parallelized by hand"), Probe()
    strategy = MoEEPStrategy(ep=case.ep, reduce_every_micro_batch=mode == "reduce every micro-batch")
    _fit(module, probe, strategy=strategy, accumulate_grad_batches=len(case.tokens[0]))
    return {
        "initial": probe.initial,
        "gradients": probe.gradients[0],
        "scale": module.first_scale,
        "scale gradient": module.scale_gradient,
        "norm": probe.norms[0],
        "final": module.scale.detach(),
    }


@pytest.mark.parametrize("mode", ["reduce once", "reduce every micro-batch", "parallelized by hand"])
@pytest.mark.parametrize("tokens", [((16,), (7,), (9,), (0,)), ((16, 5), (7, 8), (9, 0), (0, 3))], ids=str)
def test_parameters_on_the_module_itself(ranks: RankPool, tokens: Any, mode: str) -> None:
    case = Case(world=4, tokens=tokens)
    found = ranks.run(_scaled, case, mode, world=4)
    ours = found[0]
    assert torch.equal(ours["scale"], 1 + torch.rand(HIDDEN, generator=torch.Generator().manual_seed(0)))
    for of_rank in found:
        for name in ("scale", "scale gradient", "final", "norm"):
            assert torch.equal(torch.as_tensor(of_rank[name]), torch.as_tensor(ours[name])), name
    model = reference_model(case.kind, case.model, ours["initial"])
    scale = ours["scale"].clone().requires_grad_()
    batches = [batch for of_rank in case.batches()[0] for batch in of_rank]
    for batch in batches:
        (_scaled_loss(model, scale, batch) / len(batches)).backward()
    right = {name: p.grad for name, p in model.named_parameters()}
    assert worst({**ours["gradients"], "scale": ours["scale gradient"]}, {**right, "scale": scale.grad})[0] < 1e-5
    norm = torch.cat([g.flatten() for g in (*right.values(), scale.grad)]).norm()
    assert ours["norm"] == pytest.approx(float(norm), rel=1e-5)


class Released(Scaled):
    """The parameters on the module are frozen at first, and released after the first step."""

    def configure_model(self) -> None:
        super().configure_model()
        self.scale.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.scale.requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


def _released(case: Case) -> tuple[Tensor, Tensor]:
    module = Released(case, by_hand=False)
    _fit(module)
    return module.first_scale, module.scale.detach()


def test_a_parameter_on_the_module_that_is_released_later(ranks: RankPool) -> None:
    (first, final), (_, other) = ranks.run(_released, Case(steps=2, tokens=((16,), (7,))), world=2)
    assert not torch.equal(first, final)
    assert torch.equal(final, other)


class Frozen(CaseModule):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            block.moe.experts.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=ADAM_EPS)

    def on_train_start(self) -> None:
        self.initial = whole(dict(self.model.named_parameters()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = whole({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})


def _frozen(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], bool]:
    module = Frozen(case)
    _fit(module, gradient_clip_val=1.0)
    sharded = all(isinstance(p, DTensor) and not p.requires_grad for p in expert_parameters(module))
    return module.initial, module.gradients, whole(dict(module.model.named_parameters())), sharded


def test_frozen_experts(ranks: RankPool) -> None:
    case = Case(world=4, tokens=((16,), (7,), (9,), (0,)))
    initial, gradients, final, sharded = ranks.run(_frozen, case, world=4)[0]
    assert sharded
    right = _oracle(case, initial)
    experts = {name for name in right if ".experts." in name}
    assert gradients.keys() == right.keys() - experts
    assert worst(gradients, {name: right[name] for name in gradients})[0] < 1e-5
    for name, weight in final.items():
        assert torch.equal(weight, initial[name]) == (name in experts), name


def _ep1_by_strategy(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    module = KeepsLosses(case)
    _fit(module, strategy=MoEEPStrategy(ep=1))
    return module.losses, whole(dict(module.model.named_parameters()))


class KeepsLosses(CaseModule):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss


def _plain_fsdp2(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """What a user of FSDP2 alone writes."""
    L.seed_everything(7, verbose=False)
    model = build(case.kind, **case.model)
    for block in model.blocks if case.kind == "own" else model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAM_EPS)
    losses = []
    for step in case.batches():
        loss = loss_of(model, step[dist.get_rank()][0])
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole(dict(model.named_parameters()))


@pytest.mark.parametrize("kind", ["own", "qwen3_moe"])
def test_ep_1_is_plain_fsdp2_bit_for_bit(ranks: RankPool, kind: str) -> None:
    case = Case(kind=kind, ep=1, steps=3)
    ours, plain = ranks.run(_ep1_by_strategy, case, world=2), ranks.run(_plain_fsdp2, case, world=2)
    for (losses, weights), (right_losses, right_weights) in zip(ours, plain, strict=True):
        assert losses == right_losses
        assert weights.keys() == right_weights.keys()
        assert all(torch.equal(weights[name], right_weights[name]) for name in weights)


class _ByHand(CaseModule):
    """Parallelizes its model itself, by the function or by the strategy's method."""

    def __init__(self, case: Case, *, by_strategy: bool) -> None:
        super().__init__(case)
        self.by_strategy = by_strategy

    def configure_model(self) -> None:
        super().configure_model()
        if self.by_strategy:
            self.trainer.strategy.parallelize(self.model)
        else:
            parallelize(self.model, self.trainer.strategy.meshes)


def _fit_by_hand(by_strategy: bool) -> str:
    L.seed_everything(7, verbose=False)
    seen = []
    module = _ByHand(Case(), by_strategy=by_strategy)
    try:
        fit = trainer(MoEEPStrategy(ep=2), max_steps=1, precision="bf16-mixed")
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda m, args, out: seen.append(out.dtype) if isinstance(m, GroupedExperts) else None
        )
        fit.fit(module)
        handle.remove()
    except ValueError as error:
        return str(error)
    return str(set(seen))


def test_parallelizing_by_hand_keeps_the_precision_of_the_trainer(ranks: RankPool) -> None:
    for told in ranks.run(_fit_by_hand, False, world=2):
        assert "the Trainer's precision asks for" in told
        assert "call `self.trainer.strategy.parallelize(model)`" in told
    assert ranks.run(_fit_by_hand, True, world=2) == ["{torch.bfloat16}"] * 2
