"""Models of transformers that are trained for a step and saved in both forms, and a process of transformers alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_moe_ep import MoEEPStrategy
from tests.families.multimodal import TOWERS, multimodal_batch, multimodal_model
from tests.families.tiny import fill, tiny_batch, tiny_config
from tests.parity import trainer

FORMS = ("folder", "file")


def family_model(family: str, **config: Any) -> nn.Module:
    """A small model with a head, with fixed weights."""
    if family in TOWERS:
        return multimodal_model(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = tiny_config(family)
        for key, value in config.items():
            setattr(values, key, value)
        model = AutoModelForCausalLM.from_config(values)
    fill(model)
    return model


def family_batch(family: str) -> dict[str, Tensor]:
    return multimodal_batch(family, True, 1) if family in TOWERS else tiny_batch(family, 1, tokens=64)


class FamilyModule(L.LightningModule):
    def __init__(self, family: str = "qwen3_moe", pretrained: str | None = None, **config: Any) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        config = {key: value for key, value in self.hparams.items() if key not in ("family", "pretrained")}
        self.model = family_model(self.hparams.family, **config).train()

    def train_dataloader(self) -> Any:
        return DataLoader([family_batch(self.hparams.family)] * 8, batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).logits.float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train_family(family: str, folder: str, hparams: dict[str, Any], callbacks: list[L.Callback] | None = None) -> None:
    """On a rank: one step, saved as `FAMILY.folder` and `FAMILY.file`."""
    L.seed_everything(3, verbose=False)
    strategy = MoEEPStrategy(ep=2)
    fitted = trainer(strategy, max_steps=1, limit_val_batches=0, enable_checkpointing=False, callbacks=callbacks or [])
    fitted.fit(FamilyModule(family, **hparams))
    for form in FORMS:
        strategy._saver.folders = form == "folder"
        fitted.save_checkpoint(f"{folder}/{family}.{form}")


def train_families(families: list[str], folder: str) -> None:
    """On a rank: `train_family` for each."""
    for family in families:
        train_family(family, folder, {})


def plain_model(path: Path, family: str) -> nn.Module:
    """The plain model with the weights of a checkpoint in one file."""
    state = torch.load(path, weights_only=True)["state_dict"]
    model = family_model(family)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    return model.eval()


STOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lightning_moe_ep":
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
import torch
import transformers
torch.set_num_threads(1)
try:
    import lightning_moe_ep
    raise SystemExit("the package can be imported")
except ImportError:
    pass
for folder, batch, answer in zip(*[iter(sys.argv[1:])] * 3):
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, told = kind.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager",
                                       output_loading_info=True)
    told = {key: sorted(map(str, value)) for key, value in told.items() if value}
    with torch.no_grad():
        logits = model.eval()(**torch.load(batch)).logits
    torch.save({"logits": logits, "told": told, "state": dict(model.state_dict())}, answer)
"""
"""From folder, batch and where to answer: what stock transformers makes of them."""


def ask_stock(folder: Path, asked: dict[str, tuple[Path, dict[str, Tensor]]]) -> dict[str, dict[str, Any]]:
    """What transformers alone loads from each of several folders, in one process which cannot import the package.

    Args:
        folder: for what is passed on.
        asked: by name a Hugging Face folder and a batch.

    Returns:
        By name `logits`, `state`, and what was `told` of keys that do not fit.
    """
    arguments = []
    for name, (model, batch) in asked.items():
        torch.save(batch, folder / f"{name}.batch")
        arguments += [str(model), str(folder / f"{name}.batch"), str(folder / f"{name}.answer")]
    done = subprocess.run(
        [sys.executable, "-I", "-c", STOCK, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: torch.load(folder / f"{name}.answer", weights_only=True) for name in asked}
