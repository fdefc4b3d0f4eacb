"""Methods of transformers models that are parallel: generate, resize_token_embeddings."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_ep import MoEEPStrategy
from tests.contract import contract
from tests.matrix import mostly_more
from tests.models import VOCABULARY, build
from tests.parity import trainer
from tests.pool import RankPool

PROMPTS = (3, 7, 5, 4)
"""Tokens of each rank's prompt."""
NEW_TOKENS = 12
END = 5


def _prompt(rank: int) -> Tensor:
    return torch.randint(6, VOCABULARY, (1, PROMPTS[rank]), generator=torch.Generator().manual_seed(rank))


def _text(model: Any, rank: int, **options: Any) -> list[int]:
    """What the model goes on with; ranks end at different lengths, the one of the most at `NEW_TOKENS`."""
    limits = {"max_new_tokens": NEW_TOKENS - 3 * rank, "eos_token_id": END, "pad_token_id": 0, **options}
    return model.generate(input_ids=_prompt(rank), attention_mask=torch.ones(1, PROMPTS[rank]), **limits)[0].tolist()


class Writes(L.LightningModule):
    """Generates in evaluation."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_model(self) -> None:
        self.model = build(self.kind)
        self.model.resize_token_embeddings(VOCABULARY + 8)

    def val_dataloader(self) -> DataLoader:
        return DataLoader([0, 1], batch_size=None)

    predict_dataloader = val_dataloader

    def validation_step(self, batch: int, batch_idx: int) -> None:
        self.validated = _text(self.model, dist.get_rank(), **self.options)

    def predict_step(self, batch: int, batch_idx: int) -> list[int]:
        return _text(self.model, dist.get_rank(), **self.options)


def _generated(kind: str, ep: int, dispatcher: str, options: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    L.seed_everything(3, verbose=False)
    module = Writes(kind, options)
    run = trainer(MoEEPStrategy(ep=ep, dispatcher=dispatcher))
    run.validate(module, verbose=False)
    texts = [module.validated, *run.predict(module)]
    L.seed_everything(3, verbose=False)
    plain = Writes(kind, options)
    plain.configure_model()
    return _text(plain.model.eval(), dist.get_rank(), **options), texts


@contract(
    "Models",
    "`generate()` in a validation or predict step",
    "the text of one process, also of unlike lengths on the ranks",
)
@contract("Models", "`resize_token_embeddings` in configure_model")
@pytest.mark.parametrize(
    ("kind", "world", "ep", "dispatcher", "options"),
    mostly_more(
        [
            (kind, world, ep, dispatcher, options)
            for kind in ("qwen3_moe", "mixtral")
            for world, ep in ((2, 2), (2, 1), (4, 2))
            for dispatcher in ("all_gather", "all_to_all")
            for options in ({}, {"num_beams": 2}, {"use_cache": False})
        ],
        ("qwen3_moe", 2, 2, "all_to_all", {}),
        ("qwen3_moe", 2, 2, "all_gather", {"num_beams": 2}),
    ),
    ids=str,
)
def test_generated_text(
    ranks: RankPool, kind: str, world: int, ep: int, dispatcher: str, options: dict[str, Any]
) -> None:
    lengths = set()
    for right, texts in ranks.run(_generated, kind, ep, dispatcher, options, world=world):
        assert texts == [right] * 3
        lengths.add(len(right))
    assert len(lengths) > 1, "the ranks are to end at different lengths"


@contract(
    "Models",
    "`Fabric(strategy=MoEEPStrategy())`",
    "refused, by Fabric: `parallelize` and `build_meshes` work without a Trainer",
)
def test_fabric_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"MoEEPStrategy\(ep=2\), for lightning.pytorch.Trainer \(for Fabric: .*parallelize"
    ):
        Fabric(accelerator="cpu", devices=1, strategy=MoEEPStrategy(ep=2))
    with pytest.raises(NotImplementedError, match="Fabric has no expert-parallel strategy: give MoEEPStrategy to a"):
        Fabric(accelerator="cpu", devices=2, strategy="moe_ep_2")
