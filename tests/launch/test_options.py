"""What a Trainer cannot have with the strategy is refused in its constructor, however the strategy was named."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch.distributed as dist
from lightning.pytorch.accelerators import MPSAccelerator, XLAAccelerator
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

from lightning_moe_ep import CausalLMModule, MoEEPStrategy
from tests.contract import contract
from tests.parity import Case, CaseModule, trainer
from tests.pool import RankPool


@contract("Launch", "`sync_batchnorm=True`, LayerSync plugins", "refused: give the model other norms")
@pytest.mark.parametrize(
    "options", [{"sync_batchnorm": True}, {"plugins": [TorchSyncBatchNorm()]}], ids=["sync_batchnorm", "plugin"]
)
@pytest.mark.parametrize("named", [True, False])
def test_batch_norms(options: dict[str, Any], named: bool) -> None:
    strategy: Any = "moe_ep_2" if named else MoEEPStrategy(ep=2)
    with pytest.raises(
        ValueError, match=r"leave out sync_batchnorm and LayerSync .* \(LayerNorm, RMSNorm, GroupNorm\)"
    ):
        L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, **options)


@contract("Launch", "`accelerator` mps or tpu", "refused: use gpu or cpu")
@pytest.mark.parametrize("kind", [MPSAccelerator, XLAAccelerator])
def test_accelerators(kind: type) -> None:
    strategy = MoEEPStrategy(ep=1)
    strategy._accelerator = kind.__new__(kind)  # neither can be made here
    with pytest.raises(ValueError, match=rf"does not run on {kind.__name__}.* use accelerator='gpu', or 'cpu'"):
        strategy._configure_launcher()


@contract("Launch", "a Trainer or a module of `pytorch_lightning`", "refused: says which import to change")
def test_the_other_lightning() -> None:
    import pytorch_lightning

    change = "change `import pytorch_lightning as pl` to `import lightning.pytorch as pl`, in all files"
    with pytest.raises(ValueError, match=f"MoEEPStrategy of lightning.pytorch, in a Trainer of pytorch.*: {change}"):
        pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy=MoEEPStrategy(ep=2), logger=False)
    assert "pytorch_lightning" not in repr(MoEEPStrategy(ep=2))

    class Module(pytorch_lightning.LightningModule):
        pass

    with pytest.raises(TypeError, match=f"Module is a LightningModule of pytorch_lightning, but .*: {change}"):
        L.Trainer(accelerator="cpu", devices=1, strategy=MoEEPStrategy(ep=1), logger=False).fit(Module())
    ours = CausalLMModule(config={"model_type": "qwen3_moe"})
    with pytest.raises(TypeError, match=f"CausalLMModule is a LightningModule of lightning.pytorch, but .*: {change}"):
        pytorch_lightning.Trainer(accelerator="cpu", devices=1, logger=False).fit(ours)


def _barebones() -> int:
    bare = trainer(
        MoEEPStrategy(ep=2),
        barebones=True,
        max_steps=2,
        enable_checkpointing=None,
        enable_progress_bar=None,
        enable_model_summary=None,
        logger=None,
    )
    bare.fit(CaseModule(Case(steps=2)))
    return bare.global_step


@contract("Launch", "`barebones=True`")
def test_barebones(ranks: RankPool) -> None:
    assert ranks.run(_barebones, world=2) == [2, 2]


def _answers(name: str) -> list[str]:
    from lightning_moe_ep.launch.restarts import agree_on_name

    store = dist.FileStore(name, dist.get_world_size())
    names = []
    for attempt in range(2):
        if attempt == 0 and dist.get_rank() == 1:
            store.set("lightning_moe_ep/asks/1", "a question of a rank that has died since")
            dist.barrier()
        elif attempt == 0:
            dist.barrier()
        names.append(agree_on_name(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=20)))
    return names


def test_ranks_agree_on_a_new_name(ranks: RankPool, tmp_path: Path) -> None:
    """In a store with questions, answers and thanks of ranks before."""
    first, *others = ranks.run(_answers, str(tmp_path / "store"), world=3)
    assert all(names == first for names in others) and len(set(first)) == 2
