"""A run whose routers collapse onto a few experts, and the same run with `ExpertBiasCallback`, both watched.

`ExpertLoadMonitor` counts, warns and draws. Run it with `python examples/routing_collapse.py`: one CPU process, half a
minute. `--pictures DIR` keeps the last heatmap of each run; those of docs/monitor.md are made so.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as L
from own_model import PIECES, Block, Waves, waves
from torch import nn
from torch.utils.data import DataLoader

from lightning_moe_ep import ExpertAlert, ExpertBiasCallback, ExpertLoadMonitor, MoELayer

EXPERTS, LAYERS = 16, 4


class Favourites(Waves):
    """What all tokens have in common outweighs what tells them apart, so that each router begins with favourites.

    Only those get any tokens, only those learn, and the router comes to prefer them all the more.
    """

    def configure_model(self) -> None:
        size = self.hparams.hidden_size
        self.embed = nn.Linear(1 + PIECES, size)
        self.blocks = nn.ModuleList(Block(size, self.make_moe(size)) for _ in range(LAYERS))
        for block in self.blocks:
            nn.init.normal_(block.norm.bias, std=2.0)
        self.head = nn.Linear(size, 1)

    def make_moe(self, hidden_size: int) -> nn.Module:
        return MoELayer(hidden_size, 2 * hidden_size, num_experts=EXPERTS, top_k=2, choice_bias=True)


class Tell(L.Callback):
    """Any callback may have this hook."""

    def on_expert_alert(self, trainer: L.Trainer, pl_module: L.LightningModule, alert: ExpertAlert) -> None:
        print(f"  alert: {alert}")


def train(name: str, update_rate: float, picture: Path | None) -> None:
    L.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        monitor = ExpertLoadMonitor(
            every_n_steps=50, heatmap_every_n_steps=None if picture else 0, dirpath=folder, dead_steps=100
        )
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=5,
            callbacks=[monitor, ExpertBiasCallback(update_rate), Tell()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            Favourites(),
            DataLoader(waves(8192, seed=1), batch_size=64),
            DataLoader(waves(1024, seed=2), batch_size=128),
        )
        if picture:
            picture.write_bytes(max(Path(folder).glob("*.png")).read_bytes())
    metrics = trainer.callback_metrics
    print(
        f"{name}: {metrics['experts/dead']:.0f} of {LAYERS * EXPERTS} experts dead, the busiest does"
        f" {metrics['experts/imbalance']:.1f} times the mean, mean squared error {metrics['val_loss']:.3f}"
        " (answering 0 everywhere: 0.5)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where the heatmaps go")
    pictures = parser.parse_args().pictures
    train("left alone", 0.0, pictures and pictures / "routing_collapsed.png")  # a rate of 0 only counts
    train("balanced", 0.002, pictures and pictures / "routing_balanced.png")
