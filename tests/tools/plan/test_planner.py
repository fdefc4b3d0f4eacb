"""A whole plan: all layouts, in order, the recommendation and how it is shown."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_moe_ep import Layout, Plan, machine_of, plan
from lightning_moe_ep.planning.machine import Machine
from lightning_moe_ep.planning.shapes import shapes_of
from lightning_moe_ep.tools.plan import needs, planner
from lightning_moe_ep.tools.plan.apart import ApartError
from lightning_moe_ep.tools.plan.config import read_run
from lightning_moe_ep.tools.plan.kernels import with_kernels
from lightning_moe_ep.tools.plan.layouts import Needs, candidates, order, reason_for, rows_of
from lightning_moe_ep.tools.plan.planner import _confirm
from tests.cli.processes import QUICKSTART

TINY = [
    *("--config", str(QUICKSTART), "--trainer.precision", "bf16-true"),
    *("--model.config.hidden_size", "64", "--data.block_size", "32", "--data.batch_size", "4"),
]
MACHINE = Machine(memory=4 * 2**20, flops=1e12, intra=1e9, inter=1e8, latency=1e-5)


@pytest.fixture(scope="module")
def planned() -> Plan:
    run = read_run(TINY)
    assert (run.sequences, run.length, run.precision, run.micro_batches) == (4, 32, "bf16-true", 1)
    return plan(
        run.build,
        world=4,
        devices_per_node=2,
        sequences=4,
        length=32,
        precision=run.precision,
        strategy=run.strategy,
        device_type=run.device_type,
        machine=MACHINE,
    )


def test_all_layouts_are_there_once(planned: Plan) -> None:
    keys = [(row.candidate.layout, row.candidate) for row in planned.rows]
    assert len(keys) == len(set(keys))
    layouts = {(r.candidate.layout.replicate, r.candidate.layout.efsdp, r.candidate.layout.ep) for r in planned.rows}
    assert layouts == {(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4)}
    of_one = [r.candidate for r in planned.rows if r.candidate.layout == Layout(1, 2, 2)]
    assert len(of_one) == 3 * 2 * 3
    of_none = [r.candidate for r in planned.rows if r.candidate.layout == Layout(1, 4, 1)]
    assert len(of_none) == 2 * 2 and {c.dispatcher for c in of_none} == {"-"}


def test_the_order_and_the_recommendation(planned: Plan) -> None:
    fitting = [row for row in planned.rows if row.too_large is None]
    assert 0 < len(fitting) == planned.fitting < len(planned.rows)
    assert list(planned.rows[: len(fitting)]) == fitting  # what does not fit comes last
    seconds = [row.time.middle for row in fitting if row.time is not None]
    assert len(seconds) == len(fitting) and seconds == sorted(seconds)
    for row in planned.rows:
        assert row.needs.peak >= sum(row.needs.at_peak.values())
        assert (row.too_large is None) == (row.needs.peak <= MACHINE.memory * 0.92)  # type: ignore[operator]
    assert planned.best is fitting[0] and planned.confirmed
    assert "s a step" in planned.reason
    yours = planned.yours
    assert yours is not None and yours.candidate.layout == Layout(1, 2, 2)
    assert (yours.candidate.reshard, yours.candidate.activation_checkpointing) == (True, "none")


def test_for_people(planned: Plan) -> None:
    text = planned.text()
    lines = text.splitlines()
    assert "on 4 ranks, 2 a node, bf16-true, AdamW; 128 tokens a rank and micro-batch, 1 a step" in lines[0]
    assert lines[3].split()[:4] == ["ep", "efsdp", "replicate", "dispatcher"] and "s a step" in lines[3]
    assert sum("yours" in line for line in lines) == 1
    assert f"Recommended: MoEEPStrategy({planned.best.candidate})" in lines  # type: ignore[union-attr]
    assert f"{planned.fitting} of {len(planned.rows)} layouts fit." in lines
    assert "built at this world's size, it has these bytes" in text
    everything = planned.text(everything=True)
    assert everything.count("\n") > len(planned.rows) and "too large: " in everything and "more\n" not in everything


def test_for_programs(planned: Plan) -> None:
    told = json.loads(json.dumps(planned.as_dict()))
    best, row = told["layouts"][told["recommended"]], planned.rows[0]
    assert best["memory"]["peak"] == row.needs.peak and best["seconds"]["fastest"] == row.time.fastest  # type: ignore[union-attr]
    assert sum(message["nbytes"] for message in best["wire"]["messages"]) == pytest.approx(row.wire.nbytes)
    assert best["wire"]["intra"] + best["wire"]["inter"] == pytest.approx(row.wire.nbytes)
    assert told["layouts"][told["yours"]]["ep"] == 2 and told["machine"]["memory"] == MACHINE.memory


def test_as_a_picture(planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned.picture(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        planned.picture(tmp_path / "none" / "memory.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install lightning-moe-ep\[docs\]"):
        planned.picture(tmp_path / "other.png")


def test_nothing_is_started(planned: Plan) -> None:
    assert not dist.is_initialized()


def test_what_was_built_is_compared(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    best = planned.best
    assert best is not None
    other = replace(best, needs=replace(best.needs, optimizer=best.needs.optimizer + 1))
    built = best.needs
    monkeypatch.setattr(planner, "resident_exactly", lambda *_, **__: built)
    _confirm(best, lambda: None, "32-true", {})  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match=r"bytes of optimizer on a rank for ep=.*please report it"):
        _confirm(other, lambda: None, "32-true", {})  # type: ignore[arg-type, return-value]


def rows(planned_shapes: Any, machine: Machine, peak: dict[int, int], cp: int = 1) -> Any:
    """Rows of all candidates on 4 ranks, whose peak is given by ep."""
    shapes, look = planned_shapes

    def needs_of(candidate: Any) -> Needs:
        size = peak[candidate.layout.ep]
        at_peak = {"activations": size, "parameters": 0, "gathered weights": 0}
        return Needs(0, 0, 0, 0, 0, at_peak=at_peak, peak=size, where="")

    return rows_of(
        shapes,
        list(candidates(shapes, 4, cp=cp)),
        step=planner.Step(tokens=128),
        tokens_of=lambda layout: 128 // layout.cp,
        look=look,
        machine=machine,
        devices_per_node=2,
        needs_of=needs_of,
        host_load_of=None,
    )


def test_reasons() -> None:
    model = read_run(TINY).build()
    shapes = shapes_of(model, precision="bf16-true")
    known = shapes, planner.look_at(model, shapes, length=32)
    all_fit = rows(known, Machine(), {1: 9, 2: 9, 4: 9})
    assert all_fit[0].candidate.activation_checkpointing == "none" and all_fit[0].time is None
    assert "GB inside and" in reason_for(all_fit[0], all_fit)
    one_fits = rows(known, Machine(memory=100), {1: 99, 2: 50, 4: 99})
    assert one_fits[0].candidate.layout.ep == 2 and reason_for(one_fits[0], one_fits) == "no other ep fits"
    assert one_fits[-1].too_large.startswith("0.0 GiB of 0.0: activations")
    none_fits = Plan(
        rows=tuple(rows(known, Machine(memory=10), {1: 99, 2: 50, 4: 99})),
        best=None,
        reason="",
        yours=None,
        impossible="ep=3 does not divide the world of 4 ranks",
        world=4,
        devices_per_node=2,
        tokens=1,
        micro_batches=1,
        precision="32-true",
        parameters=1,
        optimizers=("SGD",),
        machine=Machine(memory=10),
        confirmed=False,
        notes=(),
    )
    assert "Nothing fits: use more ranks" in none_fits.text() and none_fits.as_dict()["recommended"] is None
    assert "Yours is not possible: ep=3 does not divide the world of 4 ranks." in none_fits.text()


def test_the_runs_own_layout() -> None:
    shapes = shapes_of(read_run(TINY).build())  # 8 experts
    assert planner._given(shapes, {}, 4) == (None, None)
    for options, world, words in (
        ({"ep": 2}, 7, "ep=2 times replicate=1 does not divide the world of 7 ranks"),
        ({"ep": 3}, 6, "ep=3 does not divide the 8 experts"),
    ):
        yours, impossible = planner._given(shapes, options, world)
        assert yours is None and impossible is not None and words in impossible
    yours, impossible = planner._given(shapes, {"ep": 2, "dispatcher": "mine"}, 4)
    told = planner._unknown_note(yours)
    assert impossible is None and told is not None and "what dispatcher='mine' sends and keeps is not known" in told
    yours, _ = planner._given(shapes, {"ep": 2}, 4)
    assert planner._unknown_note(yours) is None
    with pytest.raises(ValueError, match="no dispatcher is named 'al_to_all'"):
        plan(lambda: None, world=4, sequences=1, length=8, strategy={"dispatcher": "al_to_all"})  # type: ignore[arg-type, return-value]


def test_sequences_that_fit_no_rank() -> None:
    """A larger cp is looked at by itself, and compared for as many tokens."""
    run = read_run([*TINY, "--data.block_size", "2048", "--data.batch_size", "1"])
    result = plan(
        run.build,
        world=2,
        sequences=1,
        length=2047,
        precision=run.precision,
        strategy={"ep": 2, "dispatcher": "all_to_all"},
        machine=replace(MACHINE, memory=18 * 2**20),
    )
    of = {cp: [row for row in result.rows if row.candidate.layout.cp == cp] for cp in (1, 2)}
    assert not [row for row in of[1] if row.too_large is None] and result.fitting
    best, yours = result.best, result.yours
    assert best is not None and best.candidate.layout.cp == 2 and result.confirmed
    assert yours is not None and yours.candidate.layout == Layout(1, 1, 2)
    alike = next(row for row in of[2] if row.candidate == replace(yours.candidate, layout=Layout(1, 1, 2, 2)))
    assert alike.needs.parameters == yours.needs.parameters
    assert alike.needs.at_peak["activations"] == pytest.approx(yours.needs.at_peak["activations"] / 2, rel=0.05)
    assert alike.time.compute * 2 == pytest.approx(yours.time.compute * 2048 / 2047)  # type: ignore[union-attr]
    assert alike.time.attention > 0 == yours.time.attention  # type: ignore[union-attr]
    text = result.text()
    assert f"cp=2,{' dispatcher=' if best.candidate.layout.ep > 1 else ''}" in text
    columns = next(line for line in text.splitlines() if line.startswith("ep"))
    assert "replicate  cp  dispatcher" in columns and columns.endswith("tokens a step")
    assert "2,047 tokens a group of cp ranks and micro-batch" in text
    assert "accumulate 2 times as many micro-batches" in text
    assert result.as_dict()["layouts"][0]["cp"] == 2


def test_sizes_of_cp_that_cannot_be() -> None:
    model = read_run(TINY).build()  # 4 heads
    refusals = planner._Refusals(model, 24, "ulysses")
    assert refusals.of(1) is refusals.of(4) is None
    assert "does not divide the world of 24" in (refusals.of(5) or "")
    assert "does not divide the 4 attention heads" in (refusals.of(3) or "")
    assert refusals.out_of([3, 1, 2, 2]) == ([1, 2], {3: refusals.of(3)})
    with pytest.raises(ValueError, match=r"cp=3 does not divide the 4 .*; cp=5 does not divide the world"):
        refusals.out_of([5, 3])
    ring = planner._Refusals(model, 4, "ring")
    assert ring.of(1) is None and "cp_mode='ring' sends and keeps at cp=2 is not known" in (ring.of(2) or "")
    with pytest.raises(ValueError, match="cp is 0, but must be at least 1"):
        plan(lambda: model, world=4, sequences=1, length=8, cp=[0])


def test_the_order_counts_tokens() -> None:
    model = read_run(TINY).build()
    shapes = shapes_of(model, precision="bf16-true")
    look = planner.look_at(model, shapes, length=32)
    all_fit = [row for cp in (1, 2) for row in rows((shapes, look), Machine(), {1: 9, 2: 9, 4: 9}, cp)]
    best = min(all_fit, key=order)
    assert best.candidate.layout.cp == 1  # the same is sent for half of the tokens
    other = min((row for row in all_fit if row.candidate.layout.cp == 2), key=order)
    told = reason_for(best, [best, other])
    assert "cp=2" in told and told.endswith("for as many tokens")
    assert f"{other.wire.intra * 2 / 1e9:,.3g} and" in told


def test_what_else_makes_room() -> None:
    step = planner.Step(tokens=8, micro_batches=2)
    told = planner._unreduced_note(step, any_fits=False)
    assert told is not None and "reduce_every_micro_batch=True" in told
    assert planner._unreduced_note(step, any_fits=True) is None
    assert planner._unreduced_note(replace(step, reduce_every_micro_batch=True), any_fits=False) is None


def test_a_model_whose_step_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*_: Any, **__: Any) -> Any:
        raise ApartError("it looks at values")

    monkeypatch.setattr(needs, "trace", trace)
    model = read_run(TINY).build()
    shapes = shapes_of(model)
    considered = list(candidates(shapes, 2))[:1]
    needs_of, told = needs.needs_by(
        lambda: model,
        shapes,
        planner.observe_states(model),
        considered,
        batch=planner.CausalLM(sequences=1, tokens=8),
        step=planner.Step(tokens=8),
        device_type="cpu",
        options={},
    )
    assert told is not None and "activations are not in these figures" in told and "it looks at values" in told
    found = needs_of(considered[0])
    assert found.at_peak["activations"] == 0 and found.peak > found.parameters + found.optimizer > 0


@pytest.mark.parametrize("cp", [0, 3])
def test_a_cp_that_the_run_cannot_have(monkeypatch: pytest.MonkeyPatch, cp: int) -> None:
    """It is told, once, beside what there is without it."""

    def trace(*_: Any, **__: Any) -> Any:
        raise ApartError("not here")

    monkeypatch.setattr(needs, "trace", trace)
    options = {"ep": 2, "cp": cp}
    result = plan(read_run(TINY).build, world=4, sequences=1, length=8, strategy=options, confirm=False)
    assert result.best is not None and result.yours is None and (result.impossible or "").startswith("cp")
    assert not any("micro-batches" in note for note in result.notes)


def _cpu_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    uses = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


@pytest.mark.more
@pytest.mark.usefixtures("new_processes")
def test_a_large_model_in_a_minute() -> None:
    """Qwen3-30B-A3B at world 512, on two cores, whatever else they do: seconds of both together."""
    run = read_run(["--config", str(QUICKSTART.parent / "qwen3_30b_a3b.yaml")])
    start = _cpu_seconds()
    result = plan(
        run.build,
        world=512,
        sequences=1,
        length=4096,
        precision=run.precision,
        micro_batches=run.micro_batches,
        strategy=run.strategy,
        machine=machine_of("h100", run.precision),
    )
    assert _cpu_seconds() - start < 75
    assert result.confirmed and result.parameters == 30_532_122_624


def test_kernels_that_a_run_has() -> None:
    """Installed or not: what can be traced is, the rest is told."""
    run = read_run([*TINY, "--trainer.strategy.init_args.kernels", "[flash_attention_2, liger]"])
    assert run.strategy is not None and run.strategy["kernels"] == ["flash_attention_2", "liger"]
    build, told = with_kernels(run.build, ["flash_attention_2", "liger", "experts:eager"])
    config = build().model.config
    assert (config._attn_implementation, config._experts_implementation) == ("sdpa", "eager")
    assert told == ["liger's loss keeps no logits, which are planned with the activations"]
    with pytest.raises(ValueError, match="'flash', which is not known"):
        with_kernels(run.build, ["flash"])


@pytest.mark.more
def test_an_eager_attention_keeps_its_scores(planned: Plan) -> None:
    run = read_run(TINY)
    options = {**(run.strategy or {}), "kernels": ["eager"], "router_dtype": "float32"}
    eager = plan(run.build, world=4, sequences=4, length=32, precision="bf16-true", strategy=options, machine=MACHINE)
    at_peak = [max(row.needs.at_peak["activations"] for row in of.rows) for of in (planned, eager)]
    assert at_peak[0] < at_peak[1]
