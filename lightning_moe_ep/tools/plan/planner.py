"""`plan`: what a run will need at every layout of a world, before there is one.

The model is built on the meta device and asked for its shapes; all layouts are worked out from them, and the one that
is recommended is then built as a rank of that world would have it, which must come to the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_moe_ep.context_parallel.supported import check_supported
from lightning_moe_ep.experts import with_routers
from lightning_moe_ep.kernels import computation_for
from lightning_moe_ep.layout import Layout, divisors_of
from lightning_moe_ep.parallelize import check_options
from lightning_moe_ep.planning.exchange import chosen_dispatcher
from lightning_moe_ep.planning.look import look_at
from lightning_moe_ep.planning.machine import Machine
from lightning_moe_ep.planning.shapes import ModelShapes, shapes_of
from lightning_moe_ep.planning.wire import Step, layers_of
from lightning_moe_ep.tools.plan.activations import CausalLM
from lightning_moe_ep.tools.plan.exact import resident_exactly
from lightning_moe_ep.tools.plan.kernels import with_kernels
from lightning_moe_ep.tools.plan.layouts import DISPATCHERS, Candidate, Row, candidates, order, reason_for, rows_of
from lightning_moe_ep.tools.plan.load import Loading
from lightning_moe_ep.tools.plan.needs import needs_by
from lightning_moe_ep.tools.plan.report import Plan
from lightning_moe_ep.tools.plan.states import observe_states

_PASSED_ON = ("computation", "combine_dtype", "cpu_offload", "fp32_modules", "cp_mode")
"""Options of the strategy that a plan takes as they are."""


def plan(
    build: Callable[[], nn.Module],
    *,
    world: int,
    devices_per_node: int = 8,
    sequences: int,
    length: int,
    precision: str = "32-true",
    micro_batches: int = 1,
    strategy: Mapping[str, Any] | None = None,
    cp: Sequence[int] | None = None,
    device_type: str = "cuda",
    machine: Machine | None = None,
    confirm: bool = True,
) -> Plan:
    """What a run needs at every layout, which layouts fit, and which one is best.

    No process group is made in this process, and none that it has is disturbed: what needs one runs in another, which
    `build` is sent to.

    Args:
        build: makes the plain model, or a LightningModule with its model, on the meta device; a function of a module
            that can be imported, or a `functools.partial` of one.
        world: how many ranks there will be.
        devices_per_node: ranks of a node.
        sequences: of a micro-batch on one rank, or at cp > 1 on those ranks that hold slices of them.
        length: tokens of each.
        precision: the Trainer's.
        micro_batches: accumulated before the optimizer steps.
        strategy: the arguments of `MoEEPStrategy`; its layout is looked at beside all others, and options that no
            layout changes hold for all.
        cp: the sizes that are looked at, a single one in place of the strategy's; None: 1, that of the strategy, and,
            if nothing fits and there is one sequence, each larger one that the world and the model admit, until
            something does.
        device_type: where the run computes; a CPU's attention keeps more than a GPU's.
        machine: what is known of it; without figures there is no time, without its memory everything fits.
        confirm: whether the layout that is recommended is built, which must come to the same bytes.

    Raises:
        NoExpertsError: the model has no experts module.
        ValueError: something is not positive or not known by its name, or the model cannot be planned, or not at a cp
            that is asked for; says why.
        RuntimeError: what was built has other bytes than were worked out: a fault of this library.
    """
    for name, value in (
        ("world", world),
        ("devices_per_node", devices_per_node),
        ("sequences", sequences),
        ("length", length),
        ("micro_batches", micro_batches),
        *(("cp", size) for size in cp or ()),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    machine = machine or Machine()
    options = dict(strategy or {})
    if cp is not None and len({*cp}) == 1:
        options["cp"] = cp[0]
    own_cp = options.get("cp", 1)
    build, untraced = with_kernels(build, options.get("kernels", ()))
    options["computation"] = computation_for(options.get("kernels", ()), options.get("computation", "auto"))
    options["fp32_modules"] = with_routers(options.get("fp32_modules", ()), options.get("router_dtype", "auto"))
    check_options(
        **{name: options.get(name, "auto") for name in ("dispatcher", "computation", "combine_dtype")},
        cp_mode=options.get("cp_mode", "ulysses"),
    )
    model = build()
    shapes = shapes_of(model, precision=precision, fp32_modules=options["fp32_modules"])
    loading = Loading(model, shapes)
    look = look_at(model, shapes, length=length)
    states = observe_states(model)
    offload = options.get("cpu_offload", False)
    step = Step(
        tokens=sequences * length,
        micro_batches=micro_batches,
        reduce_every_micro_batch=options.get("reduce_every_micro_batch", False),
        combine_dtype=options.get("combine_dtype", "auto"),
        cpu_offload=offload,
    )
    batch = CausalLM(sequences=sequences, tokens=length)
    refusals = _Refusals(model, world, options.get("cp_mode", "ulysses"))

    def rows_at(cps: Iterable[int]) -> tuple[list[Row], str | None]:
        considered = [candidate for size in cps for candidate in candidates(shapes, world, cp=size)]
        needs_of, told = needs_by(
            build, shapes, states, considered, batch=batch, step=step, device_type=device_type, options=options
        )
        rows = rows_of(
            shapes,
            considered,
            step=step,
            tokens_of=batch.tokens_of,
            look=look,
            machine=machine,
            devices_per_node=devices_per_node,
            needs_of=needs_of,
            host_load_of=partial(loading.host_bytes, cpu_offload=offload) if loading else None,
        )
        return rows, told

    cps, left_out = refusals.out_of(cp or (1, own_cp))
    rows, told = rows_at(cps)
    searched = divisors_of(world) if cp is None and sequences == 1 else []
    larger = [size for size in searched if size > max(cps) and refusals.of(size) is None]
    while larger and rows[0].too_large is not None:
        size = larger.pop(0)
        more, untold = rows_at([size])
        if untold != told:  # without activations it would seem to fit
            left_out[size] = untold or ""
            break
        rows = sorted([*rows, *more], key=order)
    yours, impossible = _given(shapes, options, world)
    if (refusal := refusals.of(own_cp)) is not None:
        yours, impossible = None, refusal
    best = rows[0] if rows[0].too_large is None else None
    if best is not None and confirm:
        _confirm(best, build, precision, options)
    return Plan(
        rows=tuple(rows),
        best=best,
        reason=reason_for(best, rows) if best is not None else "",
        yours=next((row for row in rows if row.candidate == yours), None),
        impossible=impossible,
        world=world,
        devices_per_node=devices_per_node,
        tokens=sequences * length,
        micro_batches=micro_batches,
        precision=precision,
        parameters=sum(parameter.numel for parameter in shapes.parameters),
        optimizers=states.names,
        machine=machine,
        confirmed=best is not None and confirm,
        notes=tuple(
            note
            for note in (
                told,
                *untraced,
                states.assumed,
                look.assumed,
                _unknown_note(yours),
                _host_note(shapes, options),
                *(f"cp={size} is left out: {why}" for size, why in left_out.items() if size != own_cp),
                _sequences_note(best, own_cp) if impossible is None else None,
                _unreduced_note(step, any_fits=best is not None),
            )
            if note
        ),
    )


def _given(shapes: ModelShapes, options: Mapping[str, Any], world: int) -> tuple[Candidate | None, str | None]:
    """The candidate that the run has, and why there is none of its layout; neither: it names no layout."""
    ep = options.get("ep", "auto")
    if ep == "auto":
        return None, None
    try:
        layout = Layout.for_world(world, ep=ep, replicate=options.get("replicate", 1), cp=options.get("cp", 1))
        shapes.check_layout(layout)
    except ValueError as error:
        return None, str(error)
    name = options.get("dispatcher", "auto")
    if layout.ep > 1 and name == "auto":
        first, *_ = layers_of(shapes, {}).values()
        name = chosen_dispatcher(first, ep=layout.ep, combine_dtype=options.get("combine_dtype", "auto"))
    kept = options.get("activation_checkpointing", "none")
    candidate = Candidate(
        layout,
        dispatcher=name if layout.ep > 1 else "-",
        reshard=options.get("reshard_after_forward", True) or layout.fsdp == 1,
        activation_checkpointing="full" if kept == "selective" and layout.ep == 1 else kept,
    )
    return candidate, None


def _confirm(best: Row, build: Callable[[], nn.Module], precision: str, options: Mapping[str, Any]) -> None:
    """Build what is recommended, and compare.

    Raises:
        RuntimeError: its bytes are not those that were worked out.
    """
    candidate = best.candidate
    passed_on = {name: options[name] for name in _PASSED_ON if name in options}
    dispatcher = {"dispatcher": candidate.dispatcher} if candidate.layout.ep > 1 else {}
    built = resident_exactly(
        build,
        candidate.layout,
        precision=precision,
        options={
            **passed_on,
            **dispatcher,
            "reshard_after_forward": candidate.reshard,
            "activation_checkpointing": candidate.activation_checkpointing,
        },
    )
    for part in ("parameters", "gradients", "optimizer", "buffers"):
        planned, found = getattr(best.needs, part), getattr(built, part)
        if planned != found:
            raise RuntimeError(
                f"the plan has {planned:,} bytes of {part} on a rank for {candidate}, but what was built has {found:,};"
                " this is a fault of the library: please report it with your configuration"
            )


class _Refusals:
    """Why a model cannot be at a cp on so many ranks."""

    def __init__(self, model: nn.Module, world: int, mode: str) -> None:
        self._model, self._world, self._mode = model, world, mode

    def of(self, cp: int) -> str | None:
        """Why it cannot; None: it can."""
        if cp == 1:
            return None
        if self._mode != "ulysses":
            return f"what cp_mode={self._mode!r} sends and keeps at cp={cp} is not known; plan with cp_mode='ulysses'"
        try:
            Layout.for_world(self._world, ep=1, cp=cp)
            check_supported(self._model, cp=cp)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        return None

    def out_of(self, cps: Iterable[int]) -> tuple[list[int], dict[int, str]]:
        """Those of them that can be, and why others cannot.

        Raises:
            ValueError: none can.
        """
        asked = sorted({*cps})
        refused = {cp: refusal for cp in asked if (refusal := self.of(cp)) is not None}
        possible = [cp for cp in asked if cp not in refused]
        if not possible:
            raise ValueError("; ".join(refused.values()))
        return possible, refused


def _sequences_note(best: Row | None, own: int) -> str | None:
    """What keeps the number of sequences of a step, where another cp is recommended than the run has."""
    if best is None or best.candidate.layout.cp == own:
        return None
    cp, world = best.candidate.layout.cp, best.candidate.layout.world
    return (
        f"at cp={cp} a step has the sequences of {world // cp} groups of ranks, at cp={own} of {world // own}:"
        f" accumulate {cp / own:g} times as many micro-batches for as many"
    )


def _unknown_note(yours: Candidate | None) -> str | None:
    """That the run's own dispatcher is none of those whose bytes are known."""
    if yours is None or yours.dispatcher in (*DISPATCHERS, "-"):
        return None
    return f"yours is not in the table, as what dispatcher={yours.dispatcher!r} sends and keeps is not known"


def _unreduced_note(step: Step, *, any_fits: bool) -> str | None:
    """What else makes room, where nothing fits."""
    if any_fits or step.micro_batches == 1 or step.reduce_every_micro_batch:
        return None
    return (
        f"the gradients of whole weights are added up over {step.micro_batches} micro-batches before they are reduced;"
        " reduce_every_micro_batch=True keeps parts only, and sends more"
    )


def _host_note(shapes: ModelShapes, options: Mapping[str, Any]) -> str | None:
    """How often ranks agree on their tokens over the host, which no column has."""
    equal = options.get("equal_tokens", False)
    layers = sum(not (equal and experts.equal_tokens) for experts in shapes.experts)
    if not layers:
        return None
    return (
        f"all_gather and overlapped agree on the number of tokens over the host, {layers} times a micro-batch;"
        " equal_tokens=True leaves that out"
    )
