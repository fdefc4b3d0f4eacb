"""Text in, batches out: the data module, the window that counts tokens ahead, and a baseline."""

from lightning_moe_ep.data.bigram import bigram_loss
from lightning_moe_ep.data.position import count_batches_anew, resumable, stands_inside_epoch
from lightning_moe_ep.data.text import TextDataModule
from lightning_moe_ep.data.window import WindowedLoader, count_ahead, micro_batches_ahead

__all__ = [
    "TextDataModule",
    "WindowedLoader",
    "bigram_loss",
    "count_ahead",
    "count_batches_anew",
    "micro_batches_ahead",
    "resumable",
    "stands_inside_epoch",
]
