"""The two ways to compute experts agree with each other and with the definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe_ep import GroupedExperts
from lightning_moe_ep.experts import compute_experts
from lightning_moe_ep.rows import RowGroups, group_rows, no_rows

EXPERTS = 4


def _groups(counts: list[int]) -> RowGroups:
    return RowGroups.of(torch.tensor(counts), counts)


def _by_definition(module: GroupedExperts, rows: Tensor, counts: list[int]) -> Tensor:
    outputs = []
    expert_of_row = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert in zip(rows, expert_of_row, strict=True):
        gate, up = (module.gate_up_proj[expert] @ row).chunk(2)
        outputs.append(module.down_proj[expert] @ (F.silu(gate) * up))
    return torch.stack(outputs)


def _gradients(module: GroupedExperts, rows: Tensor, outputs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
    return list(torch.autograd.grad((outputs * weights).sum(), [rows, *module.parameters()]))


@pytest.mark.parametrize("counts", [[3, 2, 4, 1], [0, 5, 0, 2], [7, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("computation", ["grouped_mm", "loop", "auto"])
def test_equals_the_definition(computation: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    module = GroupedExperts(16, 8, EXPERTS)
    rows = torch.randn(sum(counts), 16, requires_grad=True)
    ours = compute_experts(module, rows, _groups(counts), computation=computation)
    right = _by_definition(module, rows, counts)
    torch.testing.assert_close(ours, right)
    for mine, theirs in zip(_gradients(module, rows, ours), _gradients(module, rows, right), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("computation", ["grouped_mm", "loop"])
def test_an_expert_without_rows_gets_a_zero_gradient(computation: str) -> None:
    module = GroupedExperts(16, 8, EXPERTS)
    for counts in ([2, 0, 3, 0], [0] * EXPERTS):
        rows = torch.randn(sum(counts), 16, requires_grad=True)
        outputs = compute_experts(module, rows, _groups(counts), computation=computation)
        for gradient in _gradients(module, rows, outputs)[1:]:
            zero = [bool((of_expert == 0).all()) for of_expert in gradient]
            assert zero == [count == 0 for count in counts]


@pytest.mark.parametrize("sizes", [(16, 5), (6, 8), (3, 7)], ids=str)
def test_sizes_that_grouped_mm_does_not_take(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module = GroupedExperts(*sizes, EXPERTS)
    counts = [3, 0, 4, 1]
    rows = torch.randn(sum(counts), sizes[0], requires_grad=True)
    auto = compute_experts(module, rows, _groups(counts), computation="auto")
    torch.testing.assert_close(auto, _by_definition(module, rows, counts))
    message = (
        rf"^grouped_mm takes sizes that fill multiples of 16 bytes, but H={sizes[0]}, I={sizes[1]} in torch.float32 do"
        r" not; use computation='loop' or 'auto'$"
    )
    with pytest.raises(ValueError, match=message):
        compute_experts(module, rows, _groups(counts), computation="grouped_mm")


def test_alignment_is_in_bytes() -> None:
    """Sizes that fit in fp32 need not in bf16."""
    module = GroupedExperts(8, 4, EXPERTS)
    rows = torch.randn(2, 8)
    compute_experts(module, rows, _groups([2, 0, 0, 0]), computation="grouped_mm")
    with pytest.raises(ValueError, match=r"H=8, I=4 in torch.bfloat16 do not"):
        compute_experts(module.bfloat16(), rows, _groups([2, 0, 0, 0]), computation="grouped_mm")


@pytest.mark.parametrize("computation", ["grouped_mm", "loop"])
def test_output_has_the_dtype_of_the_rows(computation: str) -> None:
    module = GroupedExperts(16, 8, EXPERTS).bfloat16()
    rows = torch.randn(3, 16)
    assert compute_experts(module, rows, _groups([1, 1, 1, 0]), computation=computation).dtype == torch.float32


def test_rows_are_grouped_by_expert_in_order() -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [1, 9], [0, 2]])
    groups, position = group_rows(ids, 3)
    assert groups.counts == [2, 1, 3]
    assert groups.offsets.tolist() == [2, 3, 6] and groups.offsets.dtype == torch.int32
    assert position.tolist() == [1, 6, 4, 0, 3, 7]
    assert no_rows(3, torch.device("cpu")).counts == [0, 0, 0]
