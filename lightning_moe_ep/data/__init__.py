"""Data: text in, batches out; loaders that go in step on all ranks; and what a model's loss is compared with."""

from lightning_moe_ep.data.alike import seed_workers_alike
from lightning_moe_ep.data.around import innermost
from lightning_moe_ep.data.bigram import bigram_loss
from lightning_moe_ep.data.host import Host
from lightning_moe_ep.data.lockstep import Uneven, agree, in_lockstep
from lightning_moe_ep.data.position import count_batches_anew, give_back_open_batch, resumable, stands_inside_epoch
from lightning_moe_ep.data.prediction import PredictionLoader, deal_out
from lightning_moe_ep.data.split import split_by_rank
from lightning_moe_ep.data.text import TextDataModule

__all__ = [
    "Host",
    "PredictionLoader",
    "TextDataModule",
    "Uneven",
    "agree",
    "bigram_loss",
    "count_batches_anew",
    "deal_out",
    "give_back_open_batch",
    "in_lockstep",
    "innermost",
    "resumable",
    "seed_workers_alike",
    "split_by_rank",
    "stands_inside_epoch",
]
