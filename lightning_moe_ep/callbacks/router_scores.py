"""The probabilities that a router gives to all experts, chosen or not, as means over tokens.

Most routers return their logits `[T, E]`, but not what they make of them: some choose by their softmax, some by their
sigmoids. Which it is shows in the weights that the chosen experts get. Logits and weights go in, forward by forward;
sums over tokens for each way come out, and how far each is from the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_moe_ep.callbacks.load_report import Floats
from lightning_moe_ep.experts import logits_of
from lightning_moe_ep.rows import is_recomputation


def _softmax(logits: Tensor) -> Tensor:
    # torch 2.13: on a CPU, along fewer elements than fit a vector, the last dimension takes ten times as long.
    if logits.device.type == "cpu" and logits.shape[-1] < 16:
        return logits.float().T.contiguous().softmax(dim=0).T
    return logits.softmax(dim=-1, dtype=torch.float32)


SCORES: tuple[Callable[[Tensor], Tensor], ...] = (
    _softmax,
    lambda logits: logits.float().sigmoid(),
    lambda logits: F.softplus(logits.float()).sqrt(),
)
"""Ways to make scores of logits, in the order of `RouterScores.sums`."""

TOLERANCE = 0.02
"""How far a token's weights may be from its scores, both as shares of their sums: bf16 rounds by 0.004."""


class RouterScores:
    """What one router gave each expert since the last `reset`, on this rank."""

    def __init__(self, router: nn.Module, num_experts: int, device: torch.device) -> None:
        """
        Args:
            router: is called before the experts, and returns the logits, alone or among others.
            num_experts: E.
            device: where they are.
        """
        self._num_experts = num_experts
        self.sums = torch.zeros(len(SCORES), num_experts, device=device)
        """The scores of each way as shares of their sum, summed over tokens; zero for a way that is ruled out."""
        self.misfits = torch.zeros(len(SCORES), device=device)
        """How far a token's weights were from the scores of its experts, summed over tokens."""
        self.tokens = 0
        """How many tokens that is."""
        self.way: int | None = None
        """The one of `SCORES` that it is; None: not known yet."""
        self.counting = False
        self._logits: Tensor | None = None
        self._hook: RemovableHandle = router.register_forward_hook(torch.compiler.disable(self._keep))

    def _keep(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._logits = None
        if not self.counting or is_recomputation():
            return
        logits = logits_of(output, self._num_experts)
        self._logits = None if logits is None else logits.detach()

    def count(self, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        """The router's last logits came to this choice, `[T, K]` each."""
        logits, self._logits = self._logits, None
        if logits is None or logits.numel() != len(top_k_index) * self._num_experts:
            return
        logits = logits.reshape(-1, self._num_experts)
        for way in range(len(SCORES)) if self.way is None else (self.way,):
            scores = SCORES[way](logits)
            shares = scores if way == 0 else _shares(scores)  # those of a softmax are shares already
            self.sums[way].add_(shares.sum(dim=0))
            if self.way is None:
                self.misfits[way].add_(self._misfit(scores, top_k_index, top_k_weights))
        self.tokens += len(logits)

    def _misfit(self, scores: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chooses = (top_k_index >= 0) & (top_k_index < self._num_experts)
        of_chosen = scores.gather(1, torch.where(chooses, top_k_index, 0).long()) * chooses
        weights = top_k_weights.float() * chooses
        if weights.shape[1] > 1:  # many routers scale the weights
            of_chosen, weights = _shares(of_chosen), _shares(weights)
        return (of_chosen - weights).abs().sum()

    def decide(self, misfits: Floats, tokens: int) -> None:
        """Find the way by what all ranks saw; each rank is given the same.

        Args:
            misfits: the sums of `misfits`.
            tokens: that of `tokens`.
        """
        if self.way is None and tokens:
            near, second = np.sort(misfits)[:2]
            if near < TOLERANCE * tokens and near < second / 2:
                self.way = int(np.argmin(misfits))

    def probabilities(self, sums: Floats, misfits: Floats, tokens: int) -> Floats | None:
        """`[E]`, the mean over tokens; None: there were no tokens, or the weights are made in none of these ways."""
        if not tokens or (self.way is None and misfits.min() >= TOLERANCE * tokens):
            return None
        return sums[int(np.argmin(misfits)) if self.way is None else self.way] / tokens

    def reset(self) -> None:
        self.sums.zero_()
        self.misfits.zero_()
        self.tokens = 0

    def close(self) -> None:
        self._hook.remove()
        self._logits = None


def _shares(values: Tensor) -> Tensor:
    return values / values.sum(dim=1, keepdim=True).clamp(min=1e-9)
