"""Activation checkpointing, compiled blocks and CPU offload: the numbers of one process, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from lightning_moe_ep import MoEEPStrategy, TopKRouter, remember_routing
from lightning_moe_ep.activation_checkpointing import Recomputed
from tests import parity
from tests.contract import contract
from tests.matrix import mostly_more
from tests.models import loss_of
from tests.oracle import Answer
from tests.parity import Case, CaseModule, check, train, trainer
from tests.pool import RankPool

MICRO_BATCHES: Any = ((16, 8), (8, 24))


def case_of(kind: str, **strategy: Any) -> Case:
    return Case(kind=kind, steps=2, clip=0.5, tokens=MICRO_BATCHES, strategy=strategy)


@contract(
    "Compilation and memory", "`activation_checkpointing`", '"none", "full", "selective"; applied by the strategy'
)
@pytest.mark.parametrize(
    ("kind", "how", "dispatcher"),
    mostly_more(
        [
            (kind, how, dispatcher)
            for kind in ("own", "qwen3_moe", "olmoe")
            for how in ("full", "selective")
            for dispatcher in ("all_gather", "all_to_all", "three_chunks")
        ],
        ("own", "selective", "all_gather"),
        ("qwen3_moe", "full", "all_to_all"),
        ("qwen3_moe", "selective", "all_to_all"),
    ),
)
def test_recomputed_blocks(ranks: RankPool, kind: str, how: str, dispatcher: str) -> None:
    check(ranks, case_of(kind, activation_checkpointing=how, dispatcher=dispatcher))


class Undecided(TopKRouter):
    """Chooses other experts each second time."""

    times = 0

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, _ = super().forward(hidden)
        self.times += 1
        scores = logits.softmax(-1)
        preferred = torch.arange(len(self.weight)) * (-1) ** self.times
        index = (scores + preferred).topk(self.top_k, dim=-1).indices
        return logits, scores.gather(-1, index), index


def _undecided(how: Any) -> dict[str, Tensor]:
    """On a rank: the gradients of a step; `times` counts on where the forward is recomputed."""
    module = CaseModule(case_of("own"))
    plain_configure = module.configure_model

    def configure_model() -> None:
        plain_configure()
        for block in module.model.blocks:
            block.moe.router.__class__ = Undecided
        if how is None:
            return
        for block in module.model.blocks:
            block.forward = partial(
                torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False, context_fn=how
            )

    module.configure_model = configure_model
    probe = parity.Probe()
    torch.manual_seed(0)
    trainer(MoEEPStrategy(ep=2), max_steps=1, callbacks=[probe]).fit(module)
    return probe.gradients[0]


def test_what_was_chosen_is_chosen_again(ranks: RankPool) -> None:
    (right, _), (kept, _) = (ranks.run(_undecided, how, world=2) for how in (None, remember_routing))
    assert all(torch.equal(right[name], kept[name]) for name in right)


class TwoBackwards(CaseModule):
    """Goes back through one graph twice, by hand."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = loss_of(self.model, batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(2 * loss)
        self.optimizers().step()


def _two_backwards(how: str) -> dict[str, Tensor]:
    module = TwoBackwards(case_of("own"))
    torch.manual_seed(0)
    trainer(MoEEPStrategy(ep=2, activation_checkpointing=how), max_steps=2).fit(module)
    return parity.whole(dict(module.model.named_parameters()))


def test_a_graph_that_is_kept_is_recomputed_twice(ranks: RankPool) -> None:
    (right, _), *recomputed = (ranks.run(_two_backwards, how, world=2) for how in ("none", "full", "selective"))
    for weights, _ in recomputed:
        assert all(torch.equal(weights[name], right[name]) for name in right)


class ModelsOwn(CaseModule):
    """Switches transformers' own checkpointing on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.activation_checkpointing_enable()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert all(isinstance(layer.forward, Recomputed) for layer in self.model.model.layers)
        # By default transformers has a cache, which a layer must not write to twice.
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def on_train_end(self) -> None:
        with pytest.raises(
            RuntimeError, match=r"Qwen3MoeForCausalLM is sharded .* switch its checkpointing on in conf"
        ):
            self.model.activation_checkpointing_enable()
        self.model.activation_checkpointing_disable()
        with pytest.raises(RuntimeError, match="call resize_token_embeddings on the plain model, in configure_model"):
            self.model.resize_token_embeddings(100)


def _models_own(kind: type[CaseModule]) -> float:
    module = kind(case_of("qwen3_moe"))
    torch.manual_seed(0)
    fit = trainer(MoEEPStrategy(ep=2), max_steps=2, gradient_clip_val=1.0)
    fit.fit(module)
    return float(fit.callback_metrics["grad_norm"])


class ModelsLoss(ModelsOwn):
    def configure_model(self) -> None:
        CaseModule.configure_model(self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss


@contract(
    "Compilation and memory",
    "a model's `gradient_checkpointing_enable()`",
    "becomes the strategy's, in configure_model",
)
@contract("Models", "`resize_token_embeddings` of a sharded model", "refused: call it in configure_model")
def test_a_models_own_checkpointing_becomes_ours(ranks: RankPool) -> None:
    plain, recomputed = (ranks.run(_models_own, kind, world=2) for kind in (ModelsLoss, ModelsOwn))
    assert plain == recomputed


def _compiled(case: Case, user: str | None, backend: str) -> tuple[dict[str, Tensor], Answer]:
    """On a rank: a case with compiled blocks; by the strategy, or by the module itself."""
    compile_ = partial(torch.compile, backend=backend)
    plain_configure = CaseModule.configure_model

    def configure_model(self: CaseModule) -> None:
        plain_configure(self)
        if user == "blocks":
            for block in self.model.blocks if case.kind == "own" else self.model.model.layers:
                block.compile(backend=backend)
        if user == "model":
            self.model.compile(backend=backend)

    with (
        mock.patch.object(torch, "compile", compile_),
        mock.patch.object(CaseModule, "configure_model", configure_model),
    ):
        return train(case)


def compiled(ranks: RankPool, case: Case, *, user: str | None = None, backend: str = "aot_eager") -> None:
    with mock.patch.object(parity, "train", partial(_compiled, user=user, backend=backend)):
        check(ranks, case)


@contract(
    "Compilation and memory",
    "`torch.compile` of the blocks",
    "`compile_blocks=True`; experts stay outside of the graphs",
)
@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "how", "ep"),
    [
        ("qwen3_moe", "selective", 2),
        ("own_list_deepseek", "selective", 2),
        ("own", "full", 1),
    ],
)
def test_compiled_blocks(ranks: RankPool, kind: str, how: str, ep: int) -> None:
    compiled(ranks, replace(case_of(kind, compile_blocks=True, activation_checkpointing=how), ep=ep))


@pytest.mark.more
def test_blocks_compiled_by_inductor(ranks: RankPool) -> None:
    compiled(ranks, case_of("qwen3_moe", compile_blocks=True), backend="inductor")


@contract("Compilation and memory", "`module.compile()` in configure_model", "works, of blocks and of the whole model")
@pytest.mark.more
@pytest.mark.parametrize("user", ["blocks", "model"])
def test_what_the_user_compiled(ranks: RankPool, user: str) -> None:
    compiled(ranks, case_of("qwen3_moe"), user=user)


def _compiled_before() -> None:
    module = CaseModule(case_of("own"))
    plain_configure = module.configure_model

    def configure_model() -> None:
        plain_configure()
        module.model.blocks[0].compile(backend="eager")

    module.configure_model = configure_model
    with pytest.raises(
        ValueError, match=r"a Block is compiled already, .* leave the compilation to compile_blocks=True"
    ):
        trainer(MoEEPStrategy(ep=2, activation_checkpointing="full"), max_steps=1).fit(module)


@contract(
    "Compilation and memory",
    "blocks compiled by yourself, with `activation_checkpointing`",
    "refused: use `compile_blocks=True`",
)
def test_a_checkpoint_inside_of_what_is_compiled_is_refused(ranks: RankPool) -> None:
    ranks.run(_compiled_before, world=2)


@contract(
    "Compilation and memory", "CPU offload", "`cpu_offload=True`: weights, gradients and optimizer state, by FSDP2"
)
@pytest.mark.parametrize("precision", mostly_more(["32-true", "bf16-mixed"], "32-true"))
def test_cpu_offload(ranks: RankPool, precision: str) -> None:
    case = Case(steps=2, clip=0.5, tokens=MICRO_BATCHES, strategy={"cpu_offload": True}, precision=precision)
    if precision == "32-true":
        check(ranks, case)
    else:
        (_, ours), _ = ranks.run(train, case, world=2)
        (_, theirs), _ = ranks.run(train, Case(**{**case.__dict__, "strategy": {}}), world=2)
        assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


def test_offloaded_tensors_have_a_group_for_the_host() -> None:
    for offload, backend in ((True, "cpu:gloo,cuda:nccl"), (False, "nccl")):
        strategy = MoEEPStrategy(cpu_offload=offload, process_group_backend="nccl")
        assert strategy._get_process_group_backend() == backend


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing='some' is not known; use one of \['none', 'full'"):
        MoEEPStrategy(activation_checkpointing="some")
