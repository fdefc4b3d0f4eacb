"""A fault in a strategy is named, and no other; a run without one raises no alarm."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import pytest

from lightning_moe_ep import ExpertGradientCallback, MoEEPStrategy
from lightning_moe_ep.tools.verify import judge
from lightning_moe_ep.tools.verify.compare import compare
from lightning_moe_ep.tools.verify.given import Given, Made, options_of
from lightning_moe_ep.tools.verify.measure import measure
from lightning_moe_ep.tools.verify.report import VerifyReport
from lightning_moe_ep.tools.verify.seen import Measured
from tests.parity import Case, CaseModule, PoolEnvironment
from tests.pool import RankPool
from tests.tools.verify.planted import (
    PLANTED,
    GroupNorm,
    MomentsLost,
    NotAveraged,
    OneTokenElsewhere,
    Regression,
    ReplicasApart,
    RoutingWeightsDetached,
    SharedExpertEpTimes,
    SummedOverEfsdp,
    TokensDropped,
)

Options = dict[str, Any]


def given(strategy: type[MoEEPStrategy], of_strategy: Options, of_module: Options, of_trainer: Options) -> Given:
    """A run as it would be read from a configuration."""

    def make() -> Made:
        L.seed_everything(7, verbose=False)
        options = {"accelerator": "cpu", "plugins": [PoolEnvironment()], "max_steps": 3, **of_trainer}
        return Made(Regression(**of_module), None, strategy(**of_strategy), *options_of(options))

    return Given(make)


Run = tuple[type[MoEEPStrategy], Options, Options, Options]


def on_rank(runs: Sequence[Run]) -> list[Measured | None]:
    return [measure(given(*run)) for run in runs]


def reports(ranks: RankPool, world: int, *runs: Run) -> list[VerifyReport]:
    """The reports on some runs, which the ranks do one after the other."""
    started = time.monotonic()
    runs = tuple((kind, ours, module, {**options, "devices": world}) for kind, ours, module, options in runs)
    measured = ranks.run(on_rank, runs, world=world, timeout=150)[0]
    return [compare(given(*run), seen, started=started) for run, seen in zip(runs, measured, strict=True)]


def check_planted(ranks: RankPool, world: int, *kinds: type[MoEEPStrategy]) -> None:
    """At ep 2, each of them is the one fault that is told."""
    for kind, report in zip(kinds, reports(ranks, world, *((k, {"ep": 2}, {}, {}) for k in kinds)), strict=True):
        name, words = PLANTED[kind]
        assert [fault.name for fault in report.faults] == [name], report.text()
        assert words in report.faults[0].text
        assert report.text().splitlines()[-1] == f"WRONG: {report.faults[0].text}"


OFTEN = (NotAveraged, RoutingWeightsDetached, GroupNorm, MomentsLost)
IN_GROUPS = tuple(PLANTED)[:9]
"""Those that have to be told apart wherever there are ep groups beside each other; the rest shows on two ranks."""


def test_faults_are_told_apart(ranks: RankPool) -> None:
    check_planted(ranks, 4, *OFTEN)


@pytest.mark.more
def test_further_faults_are_told_apart(ranks: RankPool) -> None:
    check_planted(ranks, 2, *(kind for kind in PLANTED if kind not in IN_GROUPS))
    check_planted(ranks, 4, *(kind for kind in IN_GROUPS if kind not in OFTEN))


@pytest.mark.more
def test_a_model_may_detach_its_routing_weights_itself(ranks: RankPool) -> None:
    (report,) = reports(ranks, 2, (MoEEPStrategy, {"ep": 2}, {"detached": True}, {}))
    assert [fault.name for fault in report.faults] == ["routing-weights-detached"], report.text()
    assert "router.weight, in one process, too: by the model itself)" in report.faults[0].text


@pytest.mark.more
def test_factors_are_told_apart_where_efsdp_is_3(ranks: RankPool) -> None:
    check_planted(ranks, 6, *IN_GROUPS)


LORA = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def of_case(case: Case) -> Given:
    def make() -> Made:
        L.seed_everything(7, verbose=False)
        of_trainer = {"accelerator": "cpu", "devices": case.world, "plugins": [PoolEnvironment()], "max_steps": 3}
        options = options_of({**of_trainer, "use_distributed_sampler": False})
        return Made(CaseModule(case), None, MoEEPStrategy(ep=case.ep), *options)

    return Given(make)


def measure_case(case: Case) -> Measured | None:
    return measure(of_case(case))


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "model", "parts"),
    [
        ("own_list_mixtral", {}, {"dense", "expert", "router"}),
        ("qwen3_moe", {"lora": LORA}, {"adapter", "expert adapter"}),
    ],
)
def test_other_forms_of_experts(ranks: RankPool, kind: str, model: Options, parts: set[str]) -> None:
    case = Case(kind=kind, model=model, steps=3)
    measured = ranks.run(measure_case, case, world=2, timeout=150)[0]
    report = compare(of_case(case), measured, started=time.monotonic())
    assert report.right, report.text()
    assert {f"{part} gradients" for part in parts} <= {check.what for check in report.checks}


@pytest.mark.more
def test_a_tie_is_no_fault(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "TIES", 0.05)
    with pytest.raises(ValueError, match="1 of 24 tokens were so near a tie between experts that they chose others in"):
        reports(ranks, 2, (OneTokenElsewhere, {"ep": 2}, {}, {}))
    monkeypatch.setattr(judge, "TIES", 0.03)
    (report,) = reports(ranks, 2, (MoEEPStrategy, {"ep": 2}, {}, {}))
    assert report.right


def test_manual_optimization_is_refused() -> None:
    module = Regression()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="Regression optimizes by itself"):
        measure(Given(lambda: Made(module, None, MoEEPStrategy(), {}, [])))


@pytest.mark.more
@pytest.mark.parametrize(
    ("noise", "words"), [(1.0, "draws random numbers in a way"), (float("nan"), "is nan: there is")]
)
def test_a_loss_that_cannot_be_compared_is_refused(ranks: RankPool, noise: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reports(ranks, 2, (MoEEPStrategy, {"ep": 2}, {"noise": noise}, {}))


@pytest.mark.more
def test_other_faults(ranks: RankPool) -> None:
    summed, apart, dropped = reports(
        ranks,
        4,
        (SummedOverEfsdp, {"ep": 1}, {}, {}),
        (ReplicasApart, {"ep": 2, "replicate": 2}, {}, {}),
        (TokensDropped, {"ep": 2}, {}, {}),
    )
    assert [fault.name for fault in summed.faults] == ["gradients-off-by-a-factor"]
    assert "expert gradients are 4 = efsdp or world times what is right" in summed.faults[0].text
    assert [fault.name for fault in apart.faults] == ["replicas-differ"]
    assert "gradients that should be replicated differ between ranks: model.head.weight" in apart.faults[0].text
    assert dropped.faults[0].name == "loss-wrong" and "rank 1 has " in dropped.faults[0].text
    assert "rank 0 has" not in dropped.faults[0].text


RIGHT: tuple[Run, ...] = (
    (MoEEPStrategy, {"ep": 2, "dispatcher": "all_gather"}, {}, {"precision": "bf16-true"}),
    (MoEEPStrategy, {"ep": 2, "dispatcher": "all_to_all"}, {"dropout": 0.0}, {"accumulate_grad_batches": 2}),
    (MoEEPStrategy, {"ep": 2, "dispatcher": "three_chunks"}, {}, {"precision": "bf16-mixed"}),
    (MoEEPStrategy, {"ep": "auto", "activation_checkpointing": "full"}, {"optimizer": "sgd"}, {}),
    (MoEEPStrategy, {"ep": 2, "replicate": 1}, {}, {"gradient_clip_algorithm": "value"}),
)


def test_right_runs_raise_no_alarm(ranks: RankPool) -> None:
    check_right(ranks, 2, *RIGHT[:3])


def check_right(ranks: RankPool, world: int, *runs: Run) -> list[VerifyReport]:
    found = reports(ranks, world, *runs)
    for report in found:
        assert report.right, report.text()
        assert report.text().splitlines()[-1] == "Nothing wrong was found."
        assert max(check.error for check in report.checks) < 1e-5
        assert {check.what for check in report.checks} >= {
            "loss",
            "norm",
            "dense gradients",
            "expert gradients",
            "router gradients",
            "shared expert gradients",
            "weights after a step",
            "weights after a resume",
        } - ({"norm"} if "clipped gradients" in {check.what for check in report.checks} else set())
    return found


@pytest.mark.more
def test_further_right_runs_raise_no_alarm(ranks: RankPool) -> None:
    check_right(ranks, 2, *RIGHT[3:])
    # It has only some of the parameters, and computes in bf16.
    (of_muon,) = reports(ranks, 2, (MoEEPStrategy, {"ep": 2}, {"optimizer": "muon"}, {}))
    assert of_muon.right, of_muon.text()
    infinite = {"callbacks": [ExpertGradientCallback(norm_type=float("inf"))]}
    check_right(
        ranks,
        4,
        (MoEEPStrategy, {"ep": 2, "replicate": 2}, {}, infinite),
        (MoEEPStrategy, {"ep": 4, "save_distributed_checkpoint": False, "cpu_offload": True}, {}, {}),
        (MoEEPStrategy, {"ep": 2, "computation": "loop", "init_on_meta": True}, {}, {}),
    )


def test_what_is_reported(ranks: RankPool) -> None:
    (report,) = reports(ranks, 2, (SharedExpertEpTimes, {"ep": 2}, {}, {"precision": "bf16-mixed"}))
    assert report.layouts == ["(replicate 1, efsdp 1, ep 2)", "(replicate 1, efsdp 2, ep 1)"]
    assert report.changes == [
        "fp32 in place of precision=bf16-mixed",
        "model.blocks: 1 of 2 blocks (0) are kept",
        "set to 0: Dropout.p, Regression.dropout",
    ]
    worst = max(report.checks, key=lambda check: check.error)
    # Of one layout only: at ep=1 there is nothing to count twice.
    assert (worst.what, worst.layout) == ("shared expert gradients", report.layouts[0])
    assert worst.at.startswith("model.blocks.0.moe.shared_expert.") and "held by rank" in worst.at
