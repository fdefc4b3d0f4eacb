"""Precision: which dtypes are seen where, what is refused, and how far bf16 is from fp32."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy
from lightning_moe_ep.parallelize import fsdp_modules
from lightning_moe_ep.precision import FSDP2Precision
from tests import oracle
from tests.matrix import mostly_more
from tests.models import HIDDEN, OwnModel, build
from tests.parity import Case, train, trainer
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


@pytest.mark.parametrize("strategy", ["moe_ep", MoEEPStrategy], ids=["alias", "instance"])
@pytest.mark.parametrize("precision", ["16-true", "16-mixed", "64-true"])
def test_unsupported_flag_is_refused(precision: str, strategy: Any) -> None:
    if (strategy, precision) == ("moe_ep", "16-mixed"):
        # Lightning itself puts bf16-mixed in its place on a CPU, before a strategy exists, and says so.
        with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
            assert _trainer(strategy=strategy, precision=precision).precision == "bf16-mixed"
        return
    with pytest.raises(ValueError, match=rf"precision='{precision}'"):
        _trainer(strategy=strategy if isinstance(strategy, str) else strategy(), precision=precision)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (HalfPrecision("16-true"), rf"precision='16-true' is not supported with expert parallelism; {SUPPORTED}"),
        (MixedPrecision("16-mixed", "cpu"), rf"precision='16-mixed' is not supported .*; {SUPPORTED}"),
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
