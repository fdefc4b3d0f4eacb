"""From what was measured and what is right to what is wrong, and how near the rest came.

A wrong number is explained before it is told: by one factor for a part of the model, by something detached from the
graph, by gradients that were clipped apart. Only what nothing explains is told as it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_moe_ep import faults
from lightning_moe_ep.faults import Fault
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.tools.verify.seen import Measured, Named, Phase, digest_of, norm_of
from lightning_moe_ep.tools.verify.single import Answer, Single

TOLERANCE = 1e-5
"""Of gradients, as a share of the largest value of each; of losses and norms, of themselves."""

FLOOR = 1e-2
"""The share of the largest gradient of all below which a parameter's own largest one is not what errors are a share of:
some gradients are zero but for round-off, as those of attention's key biases."""

STEP_TOLERANCE = 1e-3
"""Of what a step changes in a weight or in an optimizer's state: fused, foreach and plain loops round differently."""

STEP_TOLERANCES = {"Muon": 0.2}
"""Of optimizers that compute in bf16."""

ROUND_OFF = 5e-7
"""Of a weight itself."""

SAME_FACTOR = 0.01

TIES = 1e-3
"""The share of tokens of which an order of additions may decide; where it is more, something else does."""


@dataclass(frozen=True)
class Worst:
    """The largest error of some tensors."""

    name: str
    error: float
    index: tuple[int, ...]


@dataclass
class Check:
    """One comparison, in numbers."""

    layout: str
    what: str
    error: float
    at: str


@dataclass
class Verdict:
    faults: list[Fault] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    _seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, fault: Fault, part: str = "") -> None:
        """A fault of the same part that was seen before, at another layout, is the same."""
        if (fault.name, part) not in self._seen:
            self._seen.add((fault.name, part))
            self.faults.append(fault)


@dataclass
class Explanation:
    """What is wrong with gradients if others were right."""

    factors: dict[str, float]
    """Of those that are another by one factor."""
    unexplained: dict[str, Worst]


def explain(ours: Named, right: Named) -> Explanation:
    """Compare gradients, parameter by parameter."""
    overall = max((float(g.abs().max()) for g in right.values() if g.numel()), default=0.0)
    factors, unexplained = {}, {}
    for name, theirs in right.items():
        mine = ours[name]
        if not theirs.numel():
            continue
        size = max(float(theirs.abs().max()), FLOOR * overall, 1e-30)
        if (worst := _worst(name, mine, theirs, size)).error <= TOLERANCE:
            continue
        square = float(theirs.double().square().sum())
        factor = float((mine.double() * theirs.double()).sum()) / square if square else math.nan
        rest = _worst(name, mine, theirs * factor, size * max(1.0, abs(factor))) if math.isfinite(factor) else worst
        if math.isfinite(factor) and rest.error <= 10 * TOLERANCE:
            factors[name] = factor
        else:
            unexplained[name] = worst
    return Explanation(factors, unexplained)


def is_explained(ours: Named, right: Named) -> bool:
    """Whether nothing is wrong but factors, none of which is zero."""
    found = explain(ours, right)
    return not found.unexplained and all(abs(factor) > SAME_FACTOR for factor in found.factors.values())


def judge(measured: Measured, single: Single) -> Verdict:
    """Everything that is wrong, and the numbers of all that was compared.

    Raises:
        ValueError: some tokens were so near a tie that another order of additions has other experts for them.
    """
    verdict = Verdict()
    _judge_data(measured, verdict)
    for phase, answer in zip(measured.phases, single.answers, strict=True):
        _judge_start(phase, verdict)
        before = len(verdict.faults)
        _judge_losses(phase, answer, verdict)
        _judge_gradients(phase, answer, single.parts, verdict)
        if len(verdict.faults) > before:
            _check_ties(phase, answer)
        _judge_clipping(phase, verdict)
    first, second = measured.phases
    _judge_step(first, single.answers[0], verdict)
    if _judge_resume(first, second, verdict):
        _judge_step(second, single.answers[1], verdict)
    return verdict


def _judge_data(measured: Measured, verdict: Verdict) -> None:
    """Ranks whose batches of all steps are equal, and ranks of one cp group whose batches are not."""
    layout = measured.phases[0].layout
    everything = [
        "".join(digest_of(batch) for phase in measured.phases for batch in phase.step.batches[group])
        for group in range(layout.data_parallel)
    ]
    for phase in measured.phases:
        for ranks in phase.step.unlike:
            verdict.add(faults.unlike_batches(ranks))
    for digest in dict.fromkeys(everything):
        ranks = [group * layout.cp for group, other in enumerate(everything) if other == digest]
        if len(ranks) > 1:
            verdict.add(faults.same_batch(ranks))


def _judge_start(phase: Phase, verdict: Verdict) -> None:
    for layer, pairs in phase.equal_experts.items():
        num_local = phase.num_experts.get(layer, 0) // phase.layout.ep
        across = {(number % num_local, number) for number in range(num_local, num_local * phase.layout.ep)}
        if phase.layout.ep > 1 and num_local and across == set(pairs):
            verdict.add(faults.experts_equal_across_ranks(layer, num_local))
        else:
            verdict.add(faults.equal_experts(layer, pairs))
    for what, names in phase.step.differing.items():
        verdict.add(faults.replicas_differ(names, what))
    if missing := phase.step.missing:
        ranks = sorted({rank for lacking in missing.values() for rank in lacking})
        verdict.add(faults.gradient_missing(list(missing), ranks))


def _judge_losses(phase: Phase, answer: Answer, verdict: Verdict) -> None:
    largest, wrong = 0.0, {}
    first_ranks = range(0, phase.layout.world, phase.layout.cp)
    for rank, ours, right in zip(first_ranks, phase.step.losses, answer.losses, strict=True):
        for mine, theirs in zip(ours, right, strict=True):
            error = abs(mine - theirs) / max(abs(theirs), 1e-12)
            if not error <= TOLERANCE:
                wrong[rank] = (mine, theirs)
            largest = max(largest, error if error == error else math.inf)
    verdict.checks.append(Check(str(phase.layout), "loss", largest, "all ranks"))
    if wrong:
        verdict.add(faults.loss_wrong(dict(list(wrong.items())[: faults.SHOWN])))


def _check_ties(phase: Phase, answer: Answer) -> None:
    """What differs only for a token or two has no fault that could be told."""
    tokens = differing = 0
    for ours, right in zip(phase.step.chosen, answer.chosen, strict=True):
        for mine, theirs in zip(ours, right, strict=False):
            tokens += len(theirs)
            differing += int((mine.sort(dim=1).values != theirs.sort(dim=1).values).any(dim=1).sum())
    if 0 < differing <= max(1, TIES * tokens):
        raise ValueError(
            f"at {phase.layout}, {differing} of {tokens} tokens were so near a tie between experts that they chose"
            " others in one process, as sums are rounded in another order there; nothing can be told of the gradients."
            " Run it again with another --seed_everything"
        )


def _judge_gradients(phase: Phase, answer: Answer, parts: Mapping[str, str], verdict: Verdict) -> None:
    ours, right = phase.step.gradients, answer.gradients
    for part, names in sorted(_by_part(parts).items()):
        worst = worst_of({n: ours[n] for n in names}, {n: right[n] for n in names}, overall=right)
        verdict.checks.append(Check(str(phase.layout), f"{part} gradients", worst.error, _where(worst, phase)))
    if _never_learns(answer, parts):
        routers = [name for name, part in parts.items() if part == "router"]
        verdict.add(faults.routing_weights_detached(routers, in_model=True))
    found = explain(ours, right)
    zeros = [name for name, factor in found.factors.items() if parts[name] == "router" and abs(factor) < SAME_FACTOR]
    if zeros or found.unexplained:
        for what, gradients in answer.detached.items():
            if (other := explain(ours, gradients)) and not other.unexplained and not _zeros(other):
                routers = [name for name, part in parts.items() if part == "router"]
                if what == "routing weights":
                    verdict.add(faults.routing_weights_detached(routers))
                else:
                    verdict.add(faults.router_input_detached(list(found.unexplained)))
                _tell_factors(other.factors, parts, phase.layout, verdict)
                return
    if zeros:
        partly = bool(found.unexplained)
        verdict.add(faults.routing_weights_detached(zeros) if partly else faults.router_detached(zeros))
    _tell_factors({n: f for n, f in found.factors.items() if n not in zeros}, parts, phase.layout, verdict)
    if "gradients" in phase.step.differing:
        return  # what rank 0 has is as wrong as what others have
    for part, names in _by_part({name: parts[name] for name in found.unexplained}).items():
        worst = max((found.unexplained[name] for name in names), key=lambda one: one.error)
        verdict.add(faults.gradient_wrong(part, worst.name, worst.error, _where(worst, phase), len(names)), part)


def _never_learns(answer: Answer, parts: Mapping[str, str]) -> bool:
    """Whether the model's routers have no gradient in one process either.

    That is right where one expert has all the weight (K=1), or where experts return zeros, as at the start they may.
    """
    learns = defaultdict(list)
    for name, part in parts.items():
        learns[part].append(bool(answer.gradients[name].any()))
    has_weights = any(index.shape[1] > 1 for of_rank in answer.chosen for index in of_rank)
    return has_weights and bool(learns["router"]) and not any(learns["router"]) and all(learns["expert"])


def _zeros(explanation: Explanation) -> bool:
    return any(abs(factor) < SAME_FACTOR for factor in explanation.factors.values())


def _tell_factors(factors: Mapping[str, float], parts: Mapping[str, str], layout: Layout, verdict: Verdict) -> None:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, factor in factors.items():
        part = "expert" if parts[name] == "expert adapter" else parts[name]
        groups[part, f"{factor:.2g}"].append(name)
    sizes = {
        "ep": layout.ep,
        "efsdp": layout.efsdp,
        "replicate": layout.replicate,
        "cp": layout.cp,
        "world": layout.world,
    }
    for (part, _), names in groups.items():
        factor = factors[names[0]]
        times_ep = layout.ep > 1 and abs(factor / layout.ep - 1) < SAME_FACTOR
        if part == "expert" and times_ep:
            verdict.add(faults.experts_not_averaged(factor, layout.ep))
        elif part == "expert" and layout.ep > 1 and abs(factor * layout.ep - 1) < SAME_FACTOR:
            verdict.add(faults.experts_averaged_twice(factor, layout.ep))
        elif part == "shared expert" and times_ep:
            verdict.add(faults.shared_expert_counted_ep_times(factor))
        else:
            verdict.add(faults.wrong_factor(part, factor, sizes, names), f"{part} {factor:.2g}")


def _judge_clipping(phase: Phase, verdict: Verdict) -> None:
    step = phase.step
    if phase.value_clip:
        right = {name: gradient.clamp(-step.clip, step.clip) for name, gradient in step.gradients.items()}
        worst = worst_of(step.clipped, right, overall=right)
        verdict.checks.append(Check(str(phase.layout), "clipped gradients", worst.error, _where(worst, phase)))
        if worst.error > TOLERANCE:
            verdict.add(faults.step_wrong("clipped gradients", worst.name, worst.error, _where(worst, phase), 1))
        return
    # Torch's formula backwards: the norm that explains what a rank's gradients were multiplied by.
    by_part = [
        {part: step.clip / factor - 1e-6 for part, factor in of_rank.items() if factor} for of_rank in step.factors
    ]
    by_rank = {rank: max(norms.values()) for rank, norms in enumerate(by_part) if norms}
    if not by_rank:
        return
    everything = [norm for norms in by_part for norm in norms.values()]
    right_norm = norm_of(step.gradients, phase.norm_type)
    error = max(abs(norm - right_norm) for norm in everything) / max(right_norm, 1e-30)
    if not phase.own_clip:
        verdict.checks.append(Check(str(phase.layout), "norm", error, f"all ranks: {right_norm:.6g}"))
    if not _close(by_rank.values()):
        verdict.add(faults.norms_differ(by_rank))
    elif not _close(everything):
        dense, experts = (max(n[part] for n in by_part if part in n) for part in ("dense", "experts"))
        verdict.add(faults.norms_of_parts_differ(dense, experts))
    elif error > 10 * TOLERANCE and not phase.own_clip and "gradients" not in step.differing:
        verdict.add(faults.norm_wrong(everything[0], right_norm))


def _close(values: Iterable[float]) -> bool:
    values = list(values)
    return max(values) - min(values) <= 10 * TOLERANCE * max(map(abs, values))


def _judge_step(phase: Phase, answer: Answer, verdict: Verdict) -> None:
    """What the optimizer made of the gradients that it had."""
    step = phase.step
    tolerance = STEP_TOLERANCES.get(phase.optimizer, STEP_TOLERANCE)
    states = {
        key: (of_key, answer.state_after.get(key, {}), step.state_before.get(key, {}))
        for key, of_key in step.state_after.items()
    }
    for what, (ours, right, before) in {"weights": (step.after, answer.after, step.before), **states}.items():
        errors = [
            _change(name, ours[name], right[name], before.get(name, torch.zeros(()))) for name in ours if name in right
        ]
        errors += [Worst(name, math.inf, ()) for name in ours.keys() - right.keys() if ours[name].any()]
        worst = max(errors, key=lambda one: one.error, default=Worst("", 0.0, ()))
        told = "weights" if what == "weights" else f"optimizer's {what}"
        verdict.checks.append(Check(str(phase.layout), f"{told} after a step", worst.error, _where(worst, phase)))
        if worst.error > tolerance:
            count = sum(one.error > tolerance for one in errors)
            verdict.add(faults.step_wrong(told, worst.name, worst.error, _where(worst, phase), count))


def _change(name: str, ours: Tensor, right: Tensor, before: Tensor) -> Worst:
    """The error as a share of the largest change; what rounding alone makes of the values is none."""
    change = float((right - before).abs().max()) if right.numel() else 0.0
    worst = _worst(name, ours, right, 1.0)
    beyond = worst.error - ROUND_OFF * float(right.abs().max()) if right.numel() else 0.0
    return Worst(name, max(0.0, beyond) / max(change, 1e-30), worst.index)


def _judge_resume(first: Phase, second: Phase, verdict: Verdict) -> bool:
    """Whether what was loaded is what was saved."""
    saved, loaded = first.step.after, second.step.before
    worst = worst_of(loaded, saved, overall={})
    layouts = f"{first.layout} to {second.layout}"
    verdict.checks.append(Check(layouts, "weights after a resume", worst.error, _where(worst, second)))
    if worst.error > TOLERANCE:
        count = sum(not torch.equal(loaded[name], saved[name]) for name in saved)
        verdict.add(faults.weights_lost_at_resume(worst.name, worst.error, count))
    lost: dict[str, None] = {}
    largest = 0.0
    for key, of_key in first.step.state_after.items():
        for name, value in of_key.items():
            found = second.step.state_before.get(key, {}).get(name)
            error = (
                math.inf if found is None else _worst(name, found, value, max(float(value.abs().max()), 1e-30)).error
            )
            if error > TOLERANCE and value.any():
                lost[name] = None
                largest = max(largest, error)
    if first.step.state_after:
        verdict.checks.append(Check(layouts, "optimizer state after a resume", largest, ""))
    if lost and not first.step.differing:  # else each replica has a state of its own
        verdict.add(faults.moments_lost_at_resume(list(lost), len(lost)))
    return not lost


def worst_of(ours: Named, right: Named, *, overall: Named) -> Worst:
    """The largest error of all, as a share of the largest value of its tensor."""
    floor = FLOOR * max((float(g.abs().max()) for g in overall.values() if g.numel()), default=0.0)
    return max(
        (_worst(n, ours[n], t, max(float(t.abs().max()), floor, 1e-30)) for n, t in right.items() if t.numel()),
        key=lambda one: one.error,
        default=Worst("", 0.0, ()),
    )


def _worst(name: str, ours: Tensor, right: Tensor, size: float) -> Worst:
    if not right.numel():
        return Worst(name, 0.0, ())
    # A NaN is as wrong as can be.
    error = (ours.float() - right.float()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    at = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), error.shape))
    return Worst(name, float(error.flatten()[at]) / size, index)


def _by_part(parts: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, part in parts.items():
        found[part].append(name)
    return dict(found)


def _where(worst: Worst, phase: Phase) -> str:
    """The parameter, the index, and the ranks that hold it."""
    if not worst.error:
        return ""
    place = f"{worst.name}{list(worst.index)}"
    ranks: Sequence[int] = [
        rank
        for rank, part in phase.holders.get(worst.name, [])
        if len(part) == len(worst.index) and all(s.start <= i < s.stop for s, i in zip(part, worst.index, strict=True))
    ]
    return f"{place} (held by rank {', '.join(map(str, ranks))})" if ranks else place
