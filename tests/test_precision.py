"""Precision: which dtypes are seen where, what is refused, and how far bf16 is from fp32."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.data import DataLoader

from lightning_moe_ep import GroupedExperts, Layout, MoEEPStrategy, build_meshes, parallelize
from lightning_moe_ep.experts import ROUTERS as FP32_ROUTERS
from lightning_moe_ep.experts import find_routers, modules_called
from lightning_moe_ep.fsdp import fsdp_modules
from lightning_moe_ep.precision import FSDP2Precision
from lightning_moe_ep.trees import map_tensors, tensors_of
from tests import oracle
from tests.contract import contract
from tests.families.tiny import loss_of as loss_of_family
from tests.families.tiny import tiny_batch, tiny_model
from tests.list_models import BLOCKS
from tests.matrix import mostly_more
from tests.models import HIDDEN, OwnModel, build, loss_of, make_batch
from tests.parity import Case, CaseModule, plain, train, trainer
from tests.pool import RankPool

SUPPORTED = r"use one of \('32-true', 'bf16-mixed', 'bf16-true'\)"


class Seen(L.LightningModule):
    """Keeps the dtypes that a step goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        self.model = OwnModel()
        self.model.register_buffer("table", torch.ones(3, dtype=torch.float32))
        self.model.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def train_dataloader(self) -> DataLoader:
        return DataLoader([torch.randn(8, HIDDEN)], batch_size=None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        block = self.model.blocks[0]
        block.register_forward_hook(lambda module, args, output: self._keep("block", output))
        block.moe.experts.register_forward_hook(lambda module, args, output: self._keep("experts", args[0]))
        output = self.model(batch)
        self._keep("output", output)
        self._keep("buffer", self.model.table)
        self._keep("integer buffer", self.model.count)
        self.seen["default"] = torch.get_default_dtype()
        return output.float().pow(2).mean()

    def on_before_optimizer_step(self, optimizer: object) -> None:
        self._keep("parameter", self.model.head.weight)
        self._keep("expert parameter", self.model.blocks[0].moe.experts.down_proj)
        self._keep("gradient", self.model.head.weight.grad)

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.seen[name] = tensor.dtype

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _seen(precision: str) -> dict[str, Any]:
    module = Seen()
    trainer(MoEEPStrategy(ep=2), precision=precision, max_steps=1).fit(module)
    policies = {managed._get_fsdp_state()._mp_policy for managed in fsdp_modules(module)}
    reduce = {policy.reduce_dtype for policy in policies}
    assert torch.get_default_dtype() == torch.float32
    return {**module.seen, "reduce": reduce}


@contract("Precision", "`32-true`, `bf16-mixed`, `bf16-true`", "work, by FSDP2's policy; gradients are reduced in fp32")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_dtypes(ranks: RankPool, precision: str) -> None:
    kept = torch.bfloat16 if precision == "bf16-true" else torch.float32
    computed = torch.float32 if precision == "32-true" else torch.bfloat16
    for seen in ranks.run(_seen, precision, world=2):
        assert seen == {
            "parameter": kept,
            "expert parameter": kept,
            "gradient": kept,
            "block": computed,
            "experts": computed,
            "output": torch.float32,
            "buffer": torch.float32,
            "integer buffer": torch.int64,
            "reduce": {None if precision == "32-true" else torch.float32},
            "default": torch.float32,
        }


def test_default_dtype_is_restored_after_an_error() -> None:
    plugin = FSDP2Precision("bf16-true")
    with pytest.raises(TypeError), plugin.module_init_context():
        build("own", unknown_option=torch.get_default_dtype())
    with plugin.module_init_context():
        assert torch.get_default_dtype() == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_convert_module_leaves_buffers_and_integers() -> None:
    module = nn.BatchNorm1d(4)
    module.register_parameter("ids", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    FSDP2Precision("bf16-true").convert_module(module)
    assert module.weight.dtype == torch.bfloat16 and module.running_mean.dtype == torch.float32
    assert module.ids.dtype == torch.int64


class Custom(Precision):
    precision = "32-true"


def _trainer(**options: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, **options)


NO_FP16 = (
    r"is not supported with expert parallelism \(fp16 would need its loss scaled; bf16 has the range of fp32\);"
    rf" {SUPPORTED}"
)


@contract("Precision", "`16-true`, `16-mixed`", "refused, by flag, plugin and alias: use `bf16-mixed`, `bf16-true`")
@contract("Precision", "`64-true`", "refused")
@pytest.mark.parametrize("strategy", ["moe_ep", MoEEPStrategy], ids=["alias", "instance"])
@pytest.mark.parametrize("precision", ["16-true", "16-mixed", 16, "64-true"])
def test_unsupported_flag_is_refused(precision: str | int, strategy: Any) -> None:
    message = f"precision='{precision}' {NO_FP16 if precision != '64-true' else 'is not supported'}"
    if strategy is MoEEPStrategy and precision != "16-true":  # Lightning sees it first
        message = f"does not support .*precision='{'16-mixed' if precision == 16 else precision}'"
    with pytest.raises(ValueError, match=message):
        _trainer(strategy=strategy if isinstance(strategy, str) else strategy(), precision=precision)


def test_fp16_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_PRECISION", "16-mixed")
    with pytest.raises(ValueError, match=f"precision='16-mixed' {NO_FP16}"):
        _trainer(strategy="moe_ep_2")
    assert _trainer(strategy="moe_ep_2", precision="bf16-mixed").precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (HalfPrecision("16-true"), f"precision='16-true' {NO_FP16}"),
        (MixedPrecision("16-mixed", "cpu"), f"precision='16-mixed' {NO_FP16}"),
        (DoublePrecision(), rf"precision='64-true' is not supported with expert parallelism; {SUPPORTED}"),
        (Custom(), "the precision plugin Custom is not supported .*; leave it out and give the Trainer precision="),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Precision) else "",
)
@pytest.mark.parametrize("strategy", ["moe_ep", MoEEPStrategy], ids=["alias", "instance"])
def test_unsupported_plugin_is_refused(strategy: Any, plugin: Precision, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _trainer(strategy=strategy if isinstance(strategy, str) else strategy(), plugins=[plugin])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_lightning_plugins_become_ours(precision: str) -> None:
    strategy = _trainer(strategy="moe_ep", precision=precision).strategy
    assert type(strategy.precision_plugin) is FSDP2Precision
    assert strategy.precision_plugin.precision == precision
    assert strategy.precision_plugin is strategy.precision_plugin


def error_of(ours: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The norm over all parameters of the difference, as a share of the norm of the right ones."""
    difference = torch.cat([(ours[name].double() - right[name].double()).flatten() for name in right])
    return float(difference.norm() / torch.cat([tensor.double().flatten() for tensor in right.values()]).norm())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["own", "qwen3_moe"])
@pytest.mark.parametrize("dispatcher", mostly_more(["all_gather", "all_to_all", "three_chunks"], "all_to_all"))
def test_bf16_gradients_are_as_good_as_those_of_one_process(
    ranks: RankPool, kind: str, world: int, dispatcher: str
) -> None:
    case = Case(kind=kind, world=world, precision="bf16-mixed", strategy={"dispatcher": dispatcher})
    initial, ours = ranks.run(train, case, world=world)[0]
    right = oracle.answer(case.kind, case.model, initial, case.batches())
    bf16 = oracle.answer(case.kind, case.model, initial, case.batches(), dtype=torch.bfloat16)
    of_one_process = error_of(bf16.gradients[0], right.gradients[0])
    assert error_of(ours.gradients[0], right.gradients[0]) <= 1.5 * of_one_process
    assert 1e-4 < of_one_process < 0.1  # else the comparison says nothing


# Modules in fp32.

ROUTERS = {"own": "moe.router", "qwen3_moe": "mlp.gate"}


class WithRoutersInFP32(CaseModule):
    def configure_model(self) -> None:
        super().configure_model()
        self.seen: dict[str, Any] = {}
        for name, module in self.model.named_modules():
            if name.endswith(ROUTERS[self.case.kind]):
                module.register_forward_hook(self._see)

    def _see(self, router: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        self.seen.update(input=args[0].dtype, weight=router.weight.dtype, output=first.dtype)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = dict(self.model.named_parameters())
        weight = next(p for name, p in named.items() if name.endswith(f"{ROUTERS[self.case.kind]}.weight"))
        self.seen.update(gradient=weight.grad.dtype, kept=weight.dtype)
        self.seen["others"] = {p.dtype for p in named.values() if p.shape != weight.shape}
        self.gradients = plain(self.model, {name: p.grad for name, p in named.items()})

    def on_train_start(self) -> None:
        self.initial = plain(self.model, dict(self.model.named_parameters()))


def _routers_in_fp32(
    case: Case, by_hand: bool, by_name: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    L.seed_everything(7, verbose=False)
    module = WithRoutersInFP32(case)
    if by_hand:
        build_model = module.configure_model

        def configure_model() -> None:
            build_model()
            module.trainer.strategy.parallelize(module.model)

        module.configure_model = configure_model  # type: ignore[method-assign]
    how: Any = {"fp32_modules": [ROUTERS[case.kind]]} if by_name else {"router_dtype": "float32"}
    strategy = MoEEPStrategy(ep=2, **how, **case.strategy)
    trainer(strategy, max_epochs=1, precision=case.precision).fit(module)
    return module.initial, module.gradients, module.seen


def _compiled_twice() -> None:
    meshes = build_meshes(Layout.for_world(1, ep=1), "cpu")
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        for how in ("none", "full"):
            model = build("qwen3_moe").to(torch.bfloat16)
            options: Any = {"compile_blocks": True, "router_dtype": "float32", "activation_checkpointing": how}
            parallelize(model, meshes, **options)
            loss_of(model, make_batch("qwen3_moe", 16, seed=0)).backward()


@pytest.mark.more
def test_two_compiled_models_with_routers_in_fp32(ranks: RankPool) -> None:
    ranks.run(_compiled_twice, world=1)


@contract(
    "Precision",
    "single modules in fp32",
    "`MoEEPStrategy(fp32_modules=['mlp.gate'])` keeps routers, or others, in fp32 and has them compute in it",
)
@contract("Precision", "routers in fp32", '`MoEEPStrategy(router_dtype="float32")`, in bf16-mixed and bf16-true')
@pytest.mark.parametrize(
    ("kind", "precision", "dispatcher", "by_hand", "by_name"),
    [
        ("own", "bf16-mixed", "all_to_all", False, True),
        ("own", "bf16-true", "all_gather", True, False),
        ("qwen3_moe", "bf16-true", "all_to_all", False, False),
        ("qwen3_moe", "bf16-mixed", "all_gather", False, False),
    ],
)
def test_routers_in_fp32(
    ranks: RankPool, kind: str, precision: str, dispatcher: str, by_hand: bool, by_name: bool
) -> None:
    case = Case(kind=kind, precision=precision, strategy={"dispatcher": dispatcher})
    for initial, gradients, seen in ranks.run(_routers_in_fp32, case, by_hand, by_name, world=2):
        fp32 = torch.float32
        others = {torch.bfloat16} if precision == "bf16-true" else {fp32}
        assert seen == {"input": fp32, "weight": fp32, "output": fp32, "gradient": fp32, "kept": fp32, "others": others}
        initial = {name: tensor.float() for name, tensor in initial.items()}
        right = oracle.answer(case.kind, case.model, initial, case.batches())
        bf16 = oracle.answer(case.kind, case.model, initial, case.batches(), dtype=torch.bfloat16)
        assert error_of(gradients, right.gradients[0]) <= 1.5 * error_of(bf16.gradients[0], right.gradients[0])


def _keep_call(seen: dict[str, Any], name: str, router: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    seen[name] = map_tensors(Tensor.detach, (args, kwargs)), output


def _of_family(family: str, *, mixed: bool) -> None:
    """Routers in fp32 give what the plain ones give in fp32 for the same inputs, and the model goes on in bf16."""
    in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
    for router_dtype in ("float32", "auto"):
        torch.manual_seed(0)
        model = build(family) if family in BLOCKS else tiny_model(family)
        routers = {name: (router, copy.deepcopy(router)) for name, router in find_routers(model).items()}
        if not mixed:
            kept = {id(p) for router, _ in routers.values() for p in router.parameters()}
            for parameter in model.parameters():
                if id(parameter) not in kept or router_dtype == "auto":
                    parameter.data = parameter.data.bfloat16()
        seen: dict[str, Any] = {}
        for name, (router, _) in routers.items():
            router.register_forward_hook(partial(_keep_call, seen, name), with_kwargs=True)
        meshes = build_meshes(Layout.for_world(2, ep=2), "cpu")
        parallelize(model, meshes, mp_policy=in_bf16 if mixed else None, router_dtype=router_dtype)
        blocks = {type(block) for block in model.modules() if isinstance(block, FSDPModule)}
        assert len(blocks) > 1
        batch = make_batch("own", 16, dist.get_rank()) if family in BLOCKS else tiny_batch(family, dist.get_rank())
        if family in BLOCKS and not mixed:
            batch["x"] = batch["x"].bfloat16()
        loss = loss_of(model, batch) if family in BLOCKS else loss_of_family(family, model, batch)
        loss.backward()
        assert all(p.grad is not None for router, _ in routers.values() for p in router.parameters() if p.requires_grad)
        error = 0.0
        for name, (args, output) in seen.items():
            (fp32, named) = map_tensors(lambda t: t.float() if t.is_floating_point() else t, args)
            with torch.no_grad():
                right = tensors_of(routers[name][1](*fp32, **named))
            for ours, theirs in zip(tensors_of(output), right, strict=True):
                if ours.is_floating_point() and ours.dtype == torch.float32:
                    error = max(error, float((ours - theirs).abs().max()))
        errors.append(error)
    assert errors[0] < 1e-5, errors
    assert errors[1] == 0 or errors[1] > 1e-4, errors


ROUTERS_OF = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "gemma4_text", "llama4_text", "dbrx", "jetmoe")


@pytest.mark.sweep
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("family", [*ROUTERS_OF, "inkling_text", "zaya", *BLOCKS])
def test_routers_of_families_in_fp32(ranks: RankPool, family: str, mixed: bool) -> None:
    ranks.run(partial(_of_family, mixed=mixed), family, world=2)


class BareRouter(nn.Module):
    """Uses its router's weight, but does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4, bias=False), GroupedExperts(8, 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = torch.nn.functional.linear(x, self.gate.weight).softmax(dim=-1).topk(2)
        return self.experts(x, index, weights)


def test_a_router_that_is_not_called_is_refused() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([BareRouter()])})
    with pytest.raises(NotImplementedError, match=r"gather layers\.0\.gate by itself .* BareRouter uses its weight"):
        modules_called(model, [FP32_ROUTERS])
    with pytest.raises(ValueError, match=r"router_dtype='fp32' is not known; use one of \['auto', 'float32'\]"):
        MoEEPStrategy(router_dtype="fp32")  # type: ignore[arg-type]


def _saved_dtypes(path: Path) -> None:
    torch.manual_seed(0)
    strategy = MoEEPStrategy(ep=2, router_dtype="float32", save_distributed_checkpoint=False)
    module = CaseModule(Case(kind="qwen3_moe", frozen="mlp.gate", steps=2))
    run = trainer(strategy, max_steps=1, precision="bf16-true")
    run.fit(module)
    run.save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    of_routers = {tensor.dtype for name, tensor in state.items() if "mlp.gate" in name}
    assert of_routers == {torch.float32} and torch.bfloat16 in {tensor.dtype for tensor in state.values()}
    again = CaseModule(Case(kind="qwen3_moe", frozen="mlp.gate", steps=2))
    strategy = MoEEPStrategy(ep=1, router_dtype="float32", save_distributed_checkpoint=False)
    trainer(strategy, max_steps=2, precision="bf16-true").fit(again, ckpt_path=path)
    for name, weight in plain(again.model, dict(again.model.named_parameters())).items():
        if "mlp.gate" in name:
            assert weight.dtype == torch.float32 and torch.equal(weight, state[f"model.{name}"])


@pytest.mark.more
def test_checkpoints_keep_routers_in_fp32_also_frozen_ones(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_saved_dtypes, tmp_path / "one.ckpt", world=2)


def _refused_names() -> list[str]:
    messages = []
    for name in ("gates", "moe"):
        for precision in ("bf16-mixed", "32-true"):
            refusing = trainer(MoEEPStrategy(ep=2, fp32_modules=[name]), max_epochs=1, precision=precision)
            with pytest.raises(ValueError) as error:
                refusing.fit(CaseModule(Case()))
            messages.append(str(error.value))
    return messages


def test_names_that_cannot_be_meant_are_refused(ranks: RankPool) -> None:
    none = "fp32_modules has 'gates', but no module's path ends so; the experts are at model.blocks.0.moe.experts"
    inside = "fp32_modules has 'moe', a module with the experts model.blocks.0.moe.experts in it; name others"
    assert ranks.run(_refused_names, world=2) == [[none, none, inside, inside]] * 2


class BuildFails(CaseModule):
    def configure_model(self) -> None:
        self.default = torch.get_default_dtype()
        raise RuntimeError("no model")


def _default_dtype_after_an_error() -> list[torch.dtype]:
    module = BuildFails(Case())
    with pytest.raises(RuntimeError, match="no model"):
        trainer(MoEEPStrategy(ep=2), precision="bf16-true").fit(module)
    return [module.default, torch.get_default_dtype()]


@contract("Precision", "`torch.get_default_dtype()`", "is what it was, after a fit and after an error in it")
def test_the_default_dtype_is_restored_by_a_failed_fit(ranks: RankPool) -> None:
    assert ranks.run(_default_dtype_after_an_error, world=2) == [[torch.bfloat16, torch.float32]] * 2
