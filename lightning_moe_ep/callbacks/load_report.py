"""What is said of the experts' load: from counts that were summed over the world to a handful of numbers.

Numbers of one window of steps go in; `LoadReport` says them layer by layer and in all. Neither a model nor a device is
known here, so that every rank comes to the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayerLoad:
    """The load of one experts module in a window of steps, over the whole world."""

    name: str
    """Its path in the model, but for what all of them have in common."""

    pairs: Floats
    """`[E]`: (token, expert) pairs of each expert."""

    pairs_of_rank: Floats | None
    """`[world]`: pairs that each rank's experts computed; None: the dispatcher counts none."""

    ep: int
    """Ranks that share one set of experts: r and its neighbours, from r - r % ep on."""

    probabilities: Floats | None = None
    """`[E]`: the mean over tokens of what the router gives each expert; sums to 1. None: it is not known."""

    rows_sent: float | None = None
    """Rows that ranks sent to others in a step, of tokens in forward; None: the dispatcher counts none."""

    bytes_sent: float | None = None
    """Bytes of these rows and of the sums that came back; backward sends as many."""

    tokens: float | None = None
    """Tokens that came to the layer; None: it is called with the rows of experts."""

    parameters_of_expert: float = 0.0

    @property
    def imbalance(self) -> float:
        """The largest load as a multiple of the mean."""
        return float(self.pairs.max() / self.pairs.mean())

    @property
    def entropy(self) -> float:
        """Of the distribution of pairs over experts, as a share of that of an even one."""
        shares = self.pairs[self.pairs > 0] / self.pairs.sum()
        return float(-(shares * np.log(shares)).sum() / np.log(len(self.pairs))) if len(self.pairs) > 1 else 1.0

    @property
    def dead(self) -> tuple[int, ...]:
        """The experts that got nothing."""
        return tuple(np.flatnonzero(self.pairs == 0).tolist())

    @property
    def rank_imbalance(self) -> float | None:
        """Pairs of the rank with the most, as a multiple of the mean rank's."""
        return None if self.pairs_of_rank is None else float(self.pairs_of_rank.max() / self.pairs_of_rank.mean())

    @property
    def loads_in_group(self) -> Floats | None:
        """`[world]`: each rank's pairs as a multiple of the mean in its ep group; 0 in a group without any."""
        if self.pairs_of_rank is None:
            return None
        groups = self.pairs_of_rank.reshape(-1, self.ep)
        means = groups.mean(axis=1, keepdims=True)
        return (groups / np.where(means > 0, means, 1.0)).ravel()

    def scalars(self) -> dict[str, float]:
        named: dict[str, float | None] = {
            "imbalance": self.imbalance,
            "entropy": self.entropy,
            "dead": float(len(self.dead)),
            "probability": None if self.probabilities is None else float(self.probabilities.max() * len(self.pairs)),
            "rank_imbalance": self.rank_imbalance,
            "rows_sent": self.rows_sent,
            "bytes_sent": self.bytes_sent,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, eq=False)
class LoadReport:
    """The loads of the layers that got any tokens, in the last `steps` optimizer steps."""

    step: int
    """Optimizer steps since the beginning of the training."""

    steps: int
    layers: list[LayerLoad]

    dense_parameters: float
    """Of the matrices that every token goes through."""

    @property
    def imbalance_costs(self) -> list[float] | None:
        """By layer: what share of the step is spent waiting for the rank with the most pairs.

        By counting multiplications: a rank's work is that of its pairs in each layer, and the mean rank's tokens in
        the dense matrices; in each layer all ranks wait for the slowest. None: a layer's pairs or tokens are not known.
        """
        slowest, means, tokens = [], [], []
        for layer in self.layers:
            if layer.pairs_of_rank is None or layer.tokens is None:
                return None
            slowest.append(layer.pairs_of_rank.max() * layer.parameters_of_expert)
            means.append(layer.pairs_of_rank.mean() * layer.parameters_of_expert)
            tokens.append(layer.tokens / len(layer.pairs_of_rank))
        work = sum(slowest) + max(tokens, default=0.0) * self.dense_parameters
        return [float((most - mean) / work) for most, mean in zip(slowest, means, strict=True)]

    def scalars(self, *, of_experts: bool) -> dict[str, float]:
        """By the names under which they are logged; `{}` if there were no tokens.

        Args:
            of_experts: the pairs of each expert, too.
        """
        if not self.layers:
            return {}
        by_layer = [layer.scalars() for layer in self.layers]
        costs = self.imbalance_costs
        for scalars, cost in zip(by_layer, costs or (), strict=costs is not None):
            scalars["imbalance_cost"] = cost
        combined = {
            "imbalance": max,
            "entropy": min,
            "dead": sum,
            "probability": max,
            "rank_imbalance": max,
            "rows_sent": sum,
            "bytes_sent": sum,
            "imbalance_cost": sum,
        }
        logged: dict[str, float] = {}
        for name, combine in combined.items():
            values = [scalars[name] for scalars in by_layer if name in scalars]
            if values:
                logged[f"experts/{name}"] = combine(values)  # type: ignore[operator]
        for layer, scalars in zip(self.layers, by_layer, strict=True):
            logged |= {f"experts_{name}/{layer.name}": value for name, value in scalars.items()}
            if of_experts:
                logged |= {f"experts_pairs/{layer.name}/{expert}": float(n) for expert, n in enumerate(layer.pairs)}
        return logged


def short_names(names: list[str]) -> list[str]:
    """Paths without what all have in common at the end and, but for one part, at the beginning."""
    paths = [name.split(".") for name in names]
    if len(paths) < 2:
        return names
    first, last = 0, 0
    shortest = min(map(len, paths))
    while first < shortest - 1 and len({path[first] for path in paths}) == 1:
        first += 1
    while last < shortest - first - 1 and len({path[-1 - last] for path in paths}) == 1:
        last += 1
    return [".".join(path[max(0, first - 1) : len(path) - last]) for path in paths]
