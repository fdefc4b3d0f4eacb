"""The load-balancing loss over the tokens of all ranks.

transformers computes it from a rank's own tokens. The loss is not linear in them: its mean over ranks asks each rank's
few tokens to be balanced by themselves, where only all of them together need to be. Router logits go in, a loss that
is the same on all ranks comes out; neither Lightning nor a model is known here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def load_balancing_loss(
    router_logits: tuple[Tensor, ...] | Tensor,
    num_experts: int,
    top_k: int,
    attention_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The auxiliary loss `E * sum_i f_i P_i` (Switch Transformer, arXiv 2101.03961, eq. 4), over all ranks' tokens.

    As in transformers' `load_balancing_loss_func`, the layers count as one long list of tokens, `f_i` is the mean
    number of times that a token picks expert i (so the `f_i` sum to K) and `P_i` the mean of its softmax for i; but
    the means are over the tokens of all ranks. With no token anywhere the loss is 0.

    The value is the same on every rank. Its gradient is meant to be averaged over the ranks, as DDP and FSDP2 do:
    with N tokens in all and s_r the sums of the softmax over rank r's own, the loss is `E/N * f . (s_1 + ... + s_W)`,
    and f has no gradient. Rank r only knows how s_r depends on the weights, so it differentiates `W * E/N * f . s_r`:
    the mean of these over W ranks is the gradient of one process that has all tokens. (Averaged over more ranks than
    the group's, it is that of the mean of the groups' losses.)

    Every rank of the group must call this equally often: forward sums 2E + 1 numbers over the group. Backward
    exchanges nothing, and the host does not wait for the device.

    Args:
        router_logits: `[T, E]` of each layer; T may be 0 and differ between ranks.
        num_experts: E.
        top_k: K.
        attention_mask: of T elements (`[B, S]`), the same for all layers; tokens where it is 0 do not count.
        group: the ranks; None: all, or just this process when torch.distributed is not initialised.

    Returns:
        `[]`, fp32.

    Raises:
        ValueError: there are no layers, or a layer's logits do not fit E, K or the mask.
    """
    layers = (router_logits,) if isinstance(router_logits, Tensor) else router_logits
    _check(layers, num_experts, top_k, attention_mask)
    device = layers[0].device
    picked = torch.zeros(num_experts, device=device)
    probability = torch.zeros(num_experts, device=device)
    tokens = torch.zeros(1, device=device)
    for logits in layers:
        softmax = logits.softmax(dim=-1, dtype=torch.float32)
        index = softmax.topk(top_k, dim=-1).indices
        counted = softmax.new_ones(len(logits)) if attention_mask is None else attention_mask.flatten().to(softmax)
        picked.scatter_add_(0, index.flatten(), counted.repeat_interleave(top_k))
        # No matrix product: autocast would round it to bf16.
        probability = probability + (softmax * counted.unsqueeze(1)).sum(dim=0)
        tokens += counted.sum()

    sums = torch.cat([picked, probability.detach(), tokens])
    world = 1
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums, group=group)
        world = dist.get_world_size(group)
    everyones_picked, everyones_probability, everyones_tokens = sums.split([num_experts, num_experts, 1])
    count = everyones_tokens.squeeze().clamp(min=1)
    slope = num_experts * everyones_picked / count / count
    loss = (slope * everyones_probability).sum()
    own = world * (slope * probability).sum()
    return loss + (own - own.detach())  # the value of the one, the gradient of the other


def _check(layers: tuple[Tensor, ...], num_experts: int, top_k: int, attention_mask: Tensor | None) -> None:
    if not layers:
        raise ValueError("there are no router logits; does the model return them (output_router_logits=True)?")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be between 1 and num_experts={num_experts}")
    for number, logits in enumerate(layers):
        if logits.ndim != 2 or logits.shape[1] != num_experts:
            raise ValueError(
                f"the router logits of layer {number} have the shape {list(logits.shape)}; they must be"
                f" [T, num_experts={num_experts}]"
            )
        if attention_mask is not None and attention_mask.numel() != len(logits):
            raise ValueError(
                f"the attention mask has {attention_mask.numel()} elements, but layer {number} has router logits of"
                f" {len(logits)} tokens; give it as [B, S], of the sequences that the model was called with"
            )
