"""What can be wrong with an expert-parallel run, in the words that every tool uses for it.

A tool that sees a fault says so with one of these functions: each takes the numbers that were seen and gives a `Fault`,
with a short name for programs and a sentence for people, which says what to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHOWN = 4
"""Values in a sentence."""


@dataclass(frozen=True)
class Fault:
    """Something wrong with a run."""

    name: str
    """For programs; the same whatever the numbers are."""

    text: str
    """For people: what is wrong, the numbers, and what to look at."""


def experts_not_averaged(factor: float, ep: int) -> Fault:
    return Fault(
        "experts-not-averaged",
        f"expert gradients are not averaged over ep (they are {factor:.2f} = ep times too large): each rank sums the"
        f" tokens of its ep group, so 1/{ep} is missing, which ExpertGradientCallback applies",
    )


def experts_averaged_twice(factor: float, ep: int) -> Fault:
    return Fault(
        "experts-averaged-twice",
        f"expert gradients are averaged over ep twice (they are {factor:.3g} = 1/ep of what is right): something beside"
        f" ExpertGradientCallback divides by {ep}",
    )


def shared_expert_counted_ep_times(factor: float) -> Fault:
    return Fault(
        "shared-expert-counted-ep-times",
        f"the shared expert is counted ep times (its gradients are {factor:.2f} = ep times too large): every rank"
        " computes it for its own tokens, so it is scaled and averaged like dense weights, not like experts",
    )


def wrong_factor(part: str, factor: float, sizes: Mapping[str, int], names: Sequence[str]) -> Fault:
    """Gradients are off by a factor.

    Args:
        part: of the model, such as "expert".
        factor: by which they are too large.
        sizes: of the layout, by name; one that the factor equals is named.
        names: the parameters.
    """
    equal = [name for name, size in sizes.items() if size > 1 and abs(factor / size - 1) < 0.01]
    equal += [f"1/{name}" for name, size in sizes.items() if size > 1 and abs(factor * size - 1) < 0.01]
    known = f" = {' or '.join(equal)}" if equal else ""
    return Fault(
        "gradients-off-by-a-factor",
        f"{part} gradients are {factor:.4g}{known} times what is right ({listed(names)}): the loss, or a gradient, is"
        " divided or summed over the wrong ranks",
    )


def routing_weights_detached(names: Sequence[str], *, in_model: bool = False) -> Fault:
    """The router's gradients are not those of its weights' use.

    Args:
        names: the router's parameters.
        in_model: whether it is so in one process, too.
    """
    where = ", in one process, too: by the model itself" if in_model else ""
    return Fault(
        "routing-weights-detached",
        "the routing weights are detached: the router learns nothing from what the experts return"
        f" ({listed(names)}{where}); experts have to be called with the router's own weights, not a copy outside of the"
        " graph",
    )


def router_detached(names: Sequence[str]) -> Fault:
    return Fault(
        "router-detached",
        f"the router is detached: its gradients are zero on every rank ({listed(names)}) while all others are right;"
        " its weights are used outside of the graph",
    )


def router_input_detached(names: Sequence[str]) -> Fault:
    return Fault(
        "router-input-detached",
        "the router's input is detached: no gradient flows through the routing into the layers before"
        f" ({listed(names)})",
    )


def norms_differ(norms: Mapping[int, float]) -> Fault:
    """Ranks clip by different norms.

    Args:
        norms: that of each rank.
    """
    groups: dict[str, list[int]] = {}
    for rank, norm in norms.items():
        groups.setdefault(f"{norm:.6g}", []).append(rank)
    shown = ", ".join(f"{_ranks(ranks)} by {norm}" for norm, ranks in list(groups.items())[:SHOWN])
    return Fault(
        "norms-differ",
        f"ranks clip by different norms: {shown}{', ...' if len(groups) > SHOWN else ''}; there has to be one norm,"
        " of all gradients on all ranks together",
    )


def norms_of_parts_differ(dense: float, experts: float) -> Fault:
    return Fault(
        "norms-of-parts-differ",
        f"dense gradients are clipped by {dense:.6g}, expert gradients by {experts:.6g}; there has to be one norm, of"
        " both together",
    )


def norm_wrong(norm: float, right: float) -> Fault:
    return Fault(
        "norm-wrong",
        f"all ranks clip by {norm:.6g}, but the norm of all gradients together is {right:.6g}: some are counted more"
        " than once, or not at all",
    )


def equal_experts(layer: str, pairs: Sequence[tuple[int, int]]) -> Fault:
    """Experts of one layer have the same weights.

    Args:
        layer: the path of the experts module.
        pairs: of expert ids.
    """
    shown = ", ".join(f"{i} and {j}" for i, j in pairs[:SHOWN])
    return Fault(
        "equal-experts",
        f"experts {shown}{', ...' if len(pairs) > SHOWN else ''} of {layer} are equal: they have the same weights, and"
        " may stay alike; look at how experts are initialised or loaded",
    )


def experts_equal_across_ranks(layer: str, num_local: int) -> Fault:
    return Fault(
        "experts-equal-across-ranks",
        f"experts are equal across ranks: each rank of an ep group has the same {num_local} expert(s) of {layer}; each"
        " has to make or load its own part",
    )


def same_batch(ranks: Sequence[int]) -> Fault:
    return Fault(
        "same-batch",
        f"{_ranks(ranks)} have the same batch: every rank of the world, those of one ep group too, needs data of its"
        " own; look at the sampler",
    )


def unlike_batches(ranks: Sequence[int]) -> Fault:
    return Fault(
        "unlike-batches",
        f"{_ranks(ranks)} are one cp group, but have unlike batches: each computes a slice of the same sequences; look"
        " at the sampler, and at what is drawn at random in hooks of the data",
    )


def replicas_differ(names: Sequence[str], what: str) -> Fault:
    """What should be the same on several ranks is not.

    Args:
        names: of the parameters or buffers.
        what: "weights", "gradients" or "buffers".
    """
    return Fault(
        "replicas-differ",
        f"{what} that should be replicated differ between ranks: {listed(names)}; they were not broadcast, or not"
        " averaged over all ranks",
    )


def pairs_lost(computed: int, expected: int) -> Fault:
    """Experts computed another number of (token, expert) pairs than routers chose, over the world."""
    return Fault(
        "pairs-lost",
        f"experts computed {computed} (token, expert) pairs, but the routers chose {expected}: tokens were dropped, or"
        " computed more than once, on their way",
    )


def loss_wrong(losses: Mapping[int, tuple[float, float]]) -> Fault:
    """The loss is not that of a single process.

    Args:
        losses: by rank, what it is and what is right.
    """
    shown = ", ".join(f"rank {rank} has {ours:.7g} instead of {right:.7g}" for rank, (ours, right) in losses.items())
    return Fault("loss-wrong", f"the loss is not that of a single process on the same batch: {shown}")


def gradient_wrong(part: str, name: str, error: float, where: str, count: int) -> Fault:
    """Gradients are wrong, and by no single factor.

    Args:
        part: of the model, such as "expert".
        name: the worst parameter.
        error: the largest difference, as a share of the largest gradient.
        where: the index of it, and the ranks that hold it.
        count: of parameters that are wrong.
    """
    return Fault(
        "gradient-wrong",
        f"{count} {part} gradient(s) are wrong; worst is {name}, off by {error:.2g} of its largest value, at {where}",
    )


def gradient_missing(names: Sequence[str], ranks: Sequence[int]) -> Fault:
    return Fault("gradient-missing", f"there is no gradient on {_ranks(ranks)}, where others have one: {listed(names)}")


def step_wrong(what: str, name: str, error: float, where: str, count: int) -> Fault:
    """The optimizer's step from right gradients is wrong.

    Args:
        what: "weights" or "optimizer state".
        name: the worst parameter.
        error: the largest difference, as a share of the largest change.
        where: the index of it, and the ranks that hold it.
        count: of parameters that are wrong.
    """
    return Fault(
        "step-wrong",
        f"the {what} of {count} parameter(s) after the step are not those of a single process; worst is {name}, off by"
        f" {error:.2g}, at {where}",
    )


def weights_lost_at_resume(name: str, error: float, count: int) -> Fault:
    return Fault(
        "weights-lost-at-resume",
        f"{count} parameter(s) have other weights after a checkpoint was loaded than when it was saved; worst is"
        f" {name}, off by {error:.2g} of its largest value",
    )


def moments_lost_at_resume(names: Sequence[str], count: int) -> Fault:
    return Fault(
        "moments-lost-at-resume",
        f"the optimizer's state is lost at resume: that of {count} parameter(s) is missing, zero or another than what"
        f" was saved ({listed(names)})",
    )


def listed(names: Sequence[str]) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _ranks(ranks: Sequence[int]) -> str:
    *others, last = [str(rank) for rank in ranks]
    if not others:
        return f"rank {last}"
    return f"ranks {', '.join(others)} and {last}"
