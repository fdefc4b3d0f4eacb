"""The tiny multimodal models, in one process: that they run with and without images, and what gradients reach."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.families.multimodal import ONLY_IMAGES, TOWERS, multimodal_batch, multimodal_loss, multimodal_model
from tests.families.tiny import NO_GRADIENT


@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
@pytest.mark.parametrize("family", TOWERS)
def test_forward_and_backward(family: str, images: bool) -> None:
    model = multimodal_model(family)
    loss = multimodal_loss(model, multimodal_batch(family, images, 0))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {name for name, gradient in gradients.items() if gradient is None} == {
        name for name in gradients if NO_GRADIENT.search(name) or (ONLY_IMAGES.search(name) and not images)
    }
    sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items() if gradient is not None}
    assert {name: size for name, size in sizes.items() if size < 1e-5 * max(sizes.values())} == {}

    def again(seed: int) -> Tensor:
        return multimodal_loss(multimodal_model(family), multimodal_batch(family, images, seed)).detach()

    assert torch.equal(again(0), loss.detach())
    assert again(1) != loss


@pytest.mark.parametrize("family", TOWERS)
def test_the_image_matters(family: str) -> None:
    model, batch = multimodal_model(family), multimodal_batch(family, True, 0)
    other = {**batch, "pixel_values": batch["pixel_values"].flip(0)}
    assert multimodal_loss(model, batch) != multimodal_loss(model, other)
