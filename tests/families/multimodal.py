"""Tiny whole multimodal models, and batches for them with and without images.

A rank whose batch has no image runs no vision tower, and in ernie4_5_vl_moe not the experts for images either, while
another rank may have images. Pixels, grids and token ids are made by hand, as a processor would.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig

from tests.families.tiny import fill, tiny_config, weigh

PATCH = 4
GRID = 4
"""An image has 4 x 4 patches, of which 2 x 2 become one token."""

IMAGE_TOKENS = (GRID // 2) ** 2
ROWS = 8
IMAGE, IMAGE_START, IMAGE_END, VIDEO, VIDEO_START, VIDEO_END, AUDIO, AUDIO_START, AUDIO_END = range(80, 89)

TOWERS: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": {},
    "gemma4": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 16,
    },
    "glm4v_moe": {"out_hidden_size": 64, "image_size": GRID * PATCH},
    "qwen3_vl_moe": {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
"""The vision tower of each family, beyond what all but gemma4's share."""

SHARED = {"depth": 2, "num_heads": 4}

ONLY_IMAGES = re.compile(r"\.(visual|vision_tower|resampler_model|embed_vision|vision_moe)\.")
"""The parameters that a batch without images does not reach."""


def multimodal_config(family: str) -> PreTrainedConfig:
    text = tiny_config(f"{family}_text")
    vision = {"hidden_size": 32, "intermediate_size": 48, "patch_size": PATCH, **TOWERS[family]}
    if family == "gemma4":
        text.use_bidirectional_attention = "vision"
        tokens = {"boi_token_id": IMAGE_START, "eoi_token_id": IMAGE_END, "boa_token_id": AUDIO_START}
        tokens |= {"eoa_token_index": AUDIO_END, "audio_token_id": AUDIO}
    else:
        vision |= SHARED
        tokens = {"image_start_token_id": IMAGE_START, "image_end_token_id": IMAGE_END}
        tokens |= {"video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END}
        if family == "qwen3_vl_moe":
            tokens = {"vision_start_token_id": IMAGE_START, "vision_end_token_id": IMAGE_END}
    config = CONFIG_MAPPING[family](
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, **tokens
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def multimodal_model(family: str) -> nn.Module:
    """The model for conditional generation, vision tower included; the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(multimodal_config(family)).train()
    fill(model)
    return model


def multimodal_batch(family: str, images: bool, seed: int) -> dict[str, Tensor]:
    """Inputs of 8 sequences of 12 tokens, with an image in each or with text alone."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE, (ROWS, 12), generator=generator)
    types = torch.zeros_like(ids)
    batch = {"input_ids": ids, "mm_token_type_ids": types}
    if family == "ernie4_5_vl_moe":
        batch["moe_mm_token_type_ids"] = torch.zeros_like(ids)
    if not images:
        return batch
    first, end = 4, 4 + IMAGE_TOKENS
    ids[:, first - 1], ids[:, first:end], ids[:, end] = IMAGE_START, IMAGE, IMAGE_END
    types[:, first:end] = 1
    if family == "ernie4_5_vl_moe":
        batch["moe_mm_token_type_ids"][:, first - 1 : end + 1] = 1
    channels = 3 if family in ("ernie4_5_vl_moe", "gemma4") else 2 * 3  # the others take two frames of each image
    pixels = torch.randn(ROWS, GRID * GRID, channels * PATCH * PATCH, generator=generator)
    if family == "gemma4":
        side = torch.arange(GRID)
        positions = torch.cartesian_prod(side, side).flip(1)  # (x, y) of the patches, row by row
        return {**batch, "pixel_values": pixels, "image_position_ids": positions.expand(ROWS, -1, -1)}
    grids = torch.tensor([[1, GRID, GRID]]).repeat(ROWS, 1)
    return {**batch, "pixel_values": pixels.flatten(0, 1), "image_grid_thw": grids}


def multimodal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A scalar that depends on all logits."""
    return weigh([model(**batch).logits])
