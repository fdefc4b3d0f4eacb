"""Text in, batches out: the data module, the window that counts tokens ahead, and a baseline."""

from lightning_moe_ep.data.bigram import bigram_loss
from lightning_moe_ep.data.text import TextDataModule
from lightning_moe_ep.data.window import WindowedLoader, count_ahead, micro_batches_ahead

__all__ = ["TextDataModule", "WindowedLoader", "bigram_loss", "count_ahead", "micro_batches_ahead"]
