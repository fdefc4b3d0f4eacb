"""A LightningModule of one's own with a Mixture-of-Experts layer, its experts spread over two CPU processes.

It learns a function with eight pieces, a different wave in each. Run it with `python examples/own_model.py`; it takes
seconds. What makes it expert parallel is the `strategy` line; without it, the same module runs on one device.
"""

from __future__ import annotations

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ep import MoEEPStrategy, MoELayer

PIECES = 8


class Block(nn.Module):
    """Residual, as in a transformer: each member of a ModuleList around experts becomes one FSDP2 unit."""

    def __init__(self, hidden_size: int, moe: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.moe = moe

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(self.norm(hidden))


class Waves(L.LightningModule):
    def __init__(self, hidden_size: int = 32, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        hidden_size = self.hparams.hidden_size
        self.embed = nn.Linear(1 + PIECES, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, self.make_moe(hidden_size)) for _ in range(2))
        self.head = nn.Linear(hidden_size, 1)

    def make_moe(self, hidden_size: int) -> nn.Module:
        return MoELayer(hidden_size, intermediate_size=2 * hidden_size, num_experts=PIECES, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).squeeze(-1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def waves(samples: int, seed: int) -> TensorDataset:
    """Points in [-1, 1], each with the one-hot number of its piece; in piece p, the wave of frequency p + 1."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(samples, generator=generator) * 2 - 1
    pieces = torch.randint(0, PIECES, (samples,), generator=generator)
    inputs = torch.cat([points[:, None], F.one_hot(pieces, PIECES)], dim=1)
    return TensorDataset(inputs, torch.sin((pieces + 1) * points))


def train(strategy: MoEEPStrategy, module_class: type[Waves] = Waves) -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,  # the one line
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        module_class(),
        DataLoader(waves(8192, seed=1), batch_size=64),
        DataLoader(waves(1024, seed=2), batch_size=128),
    )
    if trainer.is_global_zero:
        print(f"mean squared error {trainer.callback_metrics['val_loss']:.4f} (answering 0 everywhere: 0.5)")


if __name__ == "__main__":
    train(MoEEPStrategy(ep=2))  # each process owns four of the eight experts
