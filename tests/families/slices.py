"""One family on two ranks that hold slices: refused, or its outputs and gradients are those of whole sequences."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe_ep.context_parallel.supported import check_supported
from lightning_moe_ep.experts import expert_parameters, to_plain
from lightning_moe_ep.gradients import scale_gradients
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import build_meshes
from lightning_moe_ep.parallelize import parallelize
from lightning_moe_ep.shards import gather
from tests.families.sweep import differences
from tests.families.tiny import CANNOT_RUN, tensors_of, tiny_batch, tiny_model
from tests.pool import RankError, RankPool

CP = 2
TOKENS = 64


def cp_outcome(ranks: RankPool, family: str) -> str:
    """Runs the family; what the column "cp" of the table says."""
    if family in CANNOT_RUN:
        return "does not run in one process"
    try:
        check_supported(tiny_model(family), cp=CP)
    except NotImplementedError as error:
        return f"refused: {str(error).removeprefix(f'cp={CP}: {family} ').removesuffix('; use cp=1')}"
    try:
        wrong = ranks.run(sliced, family, world=CP)[0]
    except RankError as error:
        return f"fails: {str(error).strip().splitlines()[-1]}"
    return f"wrong: {'; '.join(wrong)}" if wrong else "works"


def sliced(family: str) -> list[str]:
    """On a rank: what is wrong with the family under context parallelism; empty on all ranks but the first."""
    wrong = []
    for packed in (False, True):
        whole = whole_batch(family, packed=packed)
        plain = tiny_model(family)
        right_outputs, loss = [], torch.zeros(())
        for part in apart(whole) if packed else [whole]:
            outputs = outputs_of(plain, part)
            loss = loss + loss_of(outputs, part)
            right_outputs.append(
                torch.cat([output.flatten(0, 1)[part["real"].flatten()] for output in outputs], dim=-1)
            )
        loss.backward()
        right = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}

        model = tiny_model(family)
        parallelize(model, build_meshes(Layout.for_world(CP, ep=CP, cp=CP), "cpu"))
        length = whole["position_ids"].shape[1] // CP
        slice_ = {n: t.narrow(1, dist.get_rank() * length, length).contiguous() for n, t in whole.items()}
        outputs = outputs_of(model, slice_)
        (CP * loss_of(outputs, slice_)).backward()  # the mean over ranks is the sum
        scale_gradients(expert_parameters(model), 1 / CP)
        gradients = {n: gather(torch.zeros_like(p) if p.grad is None else p.grad) for n, p in model.named_parameters()}
        what = "packed" if packed else "padded"
        if dist.get_rank() == 0:
            wrong += [f"{what}: {each}" for each in differences(to_plain(model, gradients), right)]
        ours = torch.cat(outputs, dim=-1).detach()
        everyone = [torch.empty_like(ours) for _ in range(CP)]
        dist.all_gather(everyone, ours)
        whole_outputs = torch.cat(everyone, dim=1).flatten(0, 1)[whole["real"].flatten()]
        expected = torch.cat(right_outputs).detach()
        if not torch.allclose(whole_outputs, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
            wrong.append(f"{what}: outputs are off by {float((whole_outputs - expected).abs().max()):.1e}")
    return wrong if dist.get_rank() == 0 else []


def whole_batch(family: str, *, packed: bool) -> dict[str, Tensor]:
    """Some rows are padded, or two sequences; `real` says which tokens count."""
    batch = dict(tiny_batch(family, seed=0, tokens=TOKENS))
    rows, length = next(iter(batch.values())).shape[:2]
    batch["position_ids"] = torch.arange(length).repeat(rows, 1)
    batch["real"] = torch.ones(rows, length, dtype=torch.bool)
    if packed:
        batch["position_ids"][:, 3:] -= 3
        batch["position_ids"][::2, 6:] -= 3
    else:
        batch["real"][::2, length - 2 :] = False
        batch["real"][1, 1:] = False
        batch["attention_mask"] = batch["real"].long()
    return batch


def apart(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Packed sequences each as a batch of its own."""
    parts = []
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            parts.append({name: tensor[row : row + 1, start:end] for name, tensor in batch.items()})
    return parts


def outputs_of(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name != "real"}
    return tensors_of(model(**inputs))


def loss_of(outputs: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A sum over the tokens that count."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(())
    for output in outputs:
        weights = torch.randn(output.shape[-1], generator=generator)
        total = total + ((output * weights).sum(dim=-1) * batch["real"]).sum() / TOKENS
    return total
