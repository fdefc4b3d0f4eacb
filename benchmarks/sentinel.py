"""What `SentinelCallback` costs: the time inside its own hooks, as a share of a training.

    python -m benchmarks.sentinel --ranks 2

A small Qwen3-MoE is trained on random tokens by a Trainer; the first check, which also meets cold caches, is among
those that count. What a check waits for other ranks is in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader

from benchmarks.harness import report
from lightning_moe_ep import CausalLMModule, MoEEPStrategy, SentinelCallback


class Timed(SentinelCallback):
    """Adds up the time in what the Trainer and the optimizers call of it."""

    def __init__(self, every_n_steps: int) -> None:
        super().__init__(every_n_steps)
        self.seconds = 0.0
        self.checks = 0
        for name in ("on_train_batch_start", "on_before_optimizer_step", "_after_step", "on_train_batch_end"):
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> None:
            begin = time.perf_counter()
            hook(*args)
            self.seconds += time.perf_counter() - begin

        return timed

    def _check(self, trainer: L.Trainer) -> Any:
        self.checks += 1
        return super()._check(trainer)


class Clock(L.Callback):
    def on_train_start(self, *_: Any) -> None:
        self.begin = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.begin


def measure(ranks: int, layers: int, hidden: int, experts: int, tokens: int, steps: int, every: int) -> dict[str, Any]:
    sentinel, clock = Timed(every), Clock()
    module = CausalLMModule(
        config={
            "model_type": "qwen3_moe",
            "vocab_size": 256,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
        }
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=MoEEPStrategy(ep=ranks),
        max_steps=steps,
        gradient_clip_val=1.0,
        callbacks=[sentinel, clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randint(0, 256, (steps * ranks, 256))
    data = [{"input_ids": row, "labels": row} for row in rows for _ in range(tokens // 256)]
    trainer.fit(module, DataLoader(data, batch_size=tokens // 256))  # type: ignore[arg-type]
    return {
        "ranks": ranks,
        "steps": steps,
        "every_n_steps": every,
        "checks": sentinel.checks,
        "step_ms": round((clock.seconds - sentinel.seconds) / steps * 1e3, 2),
        "hooks_ms_a_check": round(sentinel.seconds / sentinel.checks * 1e3, 2),
        "share_of_hooks": round(sentinel.seconds / clock.seconds, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="a rank, a multiple of 256")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=100, help="steps between two checks")
    a = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(a.ranks, a.layers, a.hidden, a.experts, a.tokens, a.steps, a.every)
    if torch.distributed.get_rank() == 0:
        report([measured])


if __name__ == "__main__":
    main()
