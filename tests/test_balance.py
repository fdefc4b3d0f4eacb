"""The load-balancing loss over all ranks against transformers' in one process: value, gradients, and in a training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as transformers_loss

from lightning_moe_ep import CausalLMModule, MoEEPStrategy, load_balancing_loss
from tests import test_causal_lm as causal_lm
from tests.dispatch.test_base import CountSyncs, count_in_backward
from tests.models import FAMILIES, build, make_batch
from tests.parity import Probe, trainer, worst
from tests.pool import RankPool

E, K, HIDDEN, LAYERS = 8, 2, 16, 3


def _tokens(counts: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Of each rank: hidden states and a mask."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(count, HIDDEN, generator=generator), torch.rand(count, generator=generator) > 0.3)
        for count in counts
    ]


def _routers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(E, HIDDEN, generator=generator).requires_grad_() for _ in range(LAYERS)]


def _of_rank(counts: tuple[int, ...], masked: bool) -> tuple[float, list[Tensor]]:
    """On a rank: the loss, and the routers' gradients as data parallelism averages them."""
    hidden, mask = _tokens(counts)[dist.get_rank()]
    routers = _routers()
    logits = tuple(hidden @ router.T for router in routers)
    loss = load_balancing_loss(logits, E, K, mask.long() if masked else None)
    loss.backward()
    for router in routers:
        assert router.grad is not None
        dist.all_reduce(router.grad)
        router.grad /= dist.get_world_size()
    return float(loss.detach()), [router.grad for router in routers]


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "a mask"])
@pytest.mark.parametrize("counts", [(12, 12), (5, 16, 0, 3)], ids=["equal", "unequal, one without tokens"])
def test_is_that_of_one_process(ranks: RankPool, counts: tuple[int, ...], masked: bool) -> None:
    routers = _routers()
    hidden, mask = (torch.cat(parts) for parts in zip(*_tokens(counts), strict=True))
    right = transformers_loss(tuple(hidden @ router.T for router in routers), E, K, mask.long() if masked else None)
    right.backward()
    gradients = {str(layer): router.grad for layer, router in enumerate(routers)}
    for loss, ours in ranks.run(_of_rank, counts, masked, world=len(counts)):
        assert loss == pytest.approx(float(right.detach()), rel=1e-5)
        error, _ = worst({str(layer): gradient for layer, gradient in enumerate(ours)}, gradients)
        assert error < 1e-5


def _in_groups() -> float:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hidden, _ = _tokens((4, 6, 5, 7))[dist.get_rank()]
    return float(load_balancing_loss(hidden @ _routers()[0].T, E, K, group=halves[dist.get_rank() // 2]).detach())


def test_over_a_group(ranks: RankPool) -> None:
    tokens = [hidden for hidden, _ in _tokens((4, 6, 5, 7))]
    losses = [transformers_loss((torch.cat(pair) @ _routers()[0].T,), E, K) for pair in (tokens[:2], tokens[2:])]
    right = [float(loss.detach()) for loss in losses for _ in range(2)]
    assert right[0] != pytest.approx(right[2], rel=1e-2)
    assert ranks.run(_in_groups, world=4) == pytest.approx(right, rel=1e-5)


def test_without_process_group() -> None:
    logits = torch.randn(9, E, requires_grad=True)
    loss, right = load_balancing_loss(logits, E, K), transformers_loss((logits,), E, K)
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=1e-6)
    (ours,), (theirs,) = torch.autograd.grad(loss, logits), torch.autograd.grad(right, logits)
    torch.testing.assert_close(ours, theirs)


def test_no_token_anywhere_is_a_zero_in_the_graph() -> None:
    for logits, mask in ((torch.zeros(0, E), None), (torch.randn(3, E), torch.zeros(3))):
        loss = load_balancing_loss(logits.requires_grad_(), E, K, mask)
        loss.backward()
        assert float(loss) == 0
        assert logits.grad is not None
        assert not logits.grad.any()


def test_is_fp32_also_of_bf16_and_under_autocast() -> None:
    logits = torch.randn(200, E).bfloat16()
    right = float(load_balancing_loss(logits.float(), E, K))
    with torch.autocast("cpu", torch.bfloat16):
        loss = load_balancing_loss(logits, E, K)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(right, rel=1e-6)


def _syncs_and_collectives() -> tuple[list[str], list[str], int, int]:
    collectives: list[str] = []
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        collectives.append(str(list(tensor.shape)))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        logits = tuple(torch.randn(5, E, requires_grad=True) for _ in range(LAYERS))
        with CountSyncs() as forward:
            loss = load_balancing_loss(logits, E, K, torch.ones(1, 5))
        in_forward = len(collectives)
        with count_in_backward() as backward:
            loss.backward()
    finally:
        dist.all_reduce = original
    assert collectives[:1] == [f"[{2 * E + 1}]"]
    return forward.syncs, backward, in_forward, len(collectives)


def test_one_small_collective_and_no_host_sync(ranks: RankPool) -> None:
    assert ranks.run(_syncs_and_collectives, world=2) == [([], [], 1, 1)] * 2


@pytest.mark.parametrize(
    ("logits", "top_k", "mask", "words"),
    [
        ((), 2, None, r"there are no router logits; does the model return them \(output_router_logits=True\)\?"),
        (torch.zeros(4, 6), 2, None, r"layer 0 have the shape \[4, 6\]; they must be \[T, num_experts=8\]"),
        ((torch.zeros(4, 8), torch.zeros(2, 2, 8)), 2, None, r"layer 1 have the shape \[2, 2, 8\]"),
        (torch.zeros(4, 8), 9, None, "top_k=9 must be between 1 and num_experts=8"),
        (torch.zeros(4, 8), 2, torch.ones(1, 3), "mask has 3 elements, but layer 0 has router logits of 4 tokens"),
    ],
)
def test_refusals(logits: Any, top_k: int, mask: Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_balancing_loss(logits, 8, top_k, mask)


# In CausalLMModule.

COEFFICIENT = 0.5
MODELS = {
    family: {**causal_lm.CONFIG, **FAMILIES[family], "model_type": family, "router_aux_loss_coef": COEFFICIENT}
    for family in FAMILIES
}


def _model(family: str, weights: dict[str, Tensor]) -> Any:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[family]))
    model.set_experts_implementation("eager")
    model.load_state_dict(weights)
    return model


def _right_step(family: str, sizes: causal_lm.Sizes, weights: dict[str, Tensor], aux_loss: str) -> dict[str, Tensor]:
    """The gradient of the cross-entropy over all tokens and of the mean of the micro-batches' auxiliary losses."""
    model = _model(family, weights)
    summed, labelled, aux = [], 0, []
    of_ranks = causal_lm.batches(sizes)
    for of_micro in zip(*of_ranks, strict=True):
        logits: list[tuple[Tensor, ...]] = []
        for batch in of_micro:
            if len(batch["input_ids"]):
                output = model(batch["input_ids"], output_router_logits=True)
                labels = batch["labels"][:, 1:]
                losses = torch.nn.functional.cross_entropy(
                    output.logits[:, :-1].transpose(1, 2), labels, reduction="none"
                )
                summed.append(losses.sum())
                labelled += int((labels != -100).sum())
                logits.append(output.router_logits)
        if aux_loss == "global":
            of_layers = tuple(torch.cat(of_layer) for of_layer in zip(*logits, strict=True))
            aux.append(transformers_loss(of_layers, 8, 2))
        else:
            aux += [transformers_loss(of_rank, 8, 2) / len(of_ranks) for of_rank in logits]
    (sum(summed) / labelled + COEFFICIENT * sum(aux) / len(of_ranks[0])).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


ACCUMULATED = (((2, 0), (1, 3)), ((3, 5), (1, 7)))
WITHOUT_TOKENS = (((2, 0), (0, 0)), ((0, 0), (3, 1)))
FOUR_RANKS = (((2, 2),), ((1, 6),), ((4, 0),), ((1, 8),))


@pytest.mark.parametrize(
    ("family", "sizes", "aux_loss"),
    [
        ("qwen3_moe", ACCUMULATED, "global"),
        ("qwen3_moe", FOUR_RANKS, "global"),
        ("mixtral", FOUR_RANKS, "global"),
        ("olmoe", WITHOUT_TOKENS, "global"),
        ("olmoe", ACCUMULATED, "local"),
        ("qwen3_moe", WITHOUT_TOKENS, "local"),
    ],
)
def test_in_a_training_step(ranks: RankPool, family: str, sizes: causal_lm.Sizes, aux_loss: str) -> None:
    config = {**MODELS[family], "output_router_logits": aux_loss == "local"}
    options = {"config": config, "aux_loss": aux_loss}
    initial, ours, _ = ranks.run(causal_lm.one_step, sizes, 2, options, world=len(sizes))[0]
    gradients = _right_step(family, sizes, initial, aux_loss)
    error, name = worst(ours, gradients)
    assert error < 1e-5, f"the gradient of {name} is off by {error:.1e}"
    other = _right_step(family, sizes, initial, "global" if aux_loss == "local" else "local")
    assert worst(other, gradients)[0] > 1e-3  # else this would not tell the two apart


def test_padding_does_not_count() -> None:
    module = CausalLMModule(MODELS["qwen3_moe"], aux_loss="global")
    fitted = causal_lm._plain(1)
    masks = []

    def seen(logits: Any, num_experts: int, top_k: int, mask: Tensor | None, group: Any) -> Tensor:
        masks.append(mask)
        return load_balancing_loss(logits, num_experts, top_k, mask, group)

    batch = {**causal_lm.make_batch(2, 0, seed=0), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    batch["attention_mask"][1, 5:] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_moe_ep.causal_lm.load_balancing_loss", seen)
        fitted.fit(module, torch.utils.data.DataLoader([batch], batch_size=None))
    assert len(masks) == 1
    assert torch.equal(masks[0], batch["attention_mask"])


@pytest.mark.parametrize("family", ["deepseek_v3", "zaya"])
def test_a_model_without_router_logits_is_refused_at_once(family: str) -> None:
    with pytest.raises(
        ValueError, match=r"aux_loss='global' needs a model that gives router logits .* of [DZ].*ForCau"
    ):
        CausalLMModule({"model_type": family}, aux_loss="global")


def test_so_is_a_pretrained_one(tmp_path: Any) -> None:
    AutoConfig.for_model("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"aux_loss='global' needs .* forward of DeepseekV3ForCausalLM"):
        CausalLMModule(pretrained=str(tmp_path), aux_loss="global")


def test_another_aux_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"aux_loss='none' is not known; use one of \['local', 'global'\]"):
        CausalLMModule(MODELS["qwen3_moe"], aux_loss="none")


# transformers' own, from the rank's batch, in a model that is spread.


class Kept(L.LightningModule):
    """Trains on the auxiliary loss and something of the output, and keeps the former."""

    def __init__(self, family: str, *, headless: bool) -> None:
        super().__init__()
        self.family, self.headless = family, headless
        self.aux_loss: float | None = None

    def configure_model(self) -> None:
        model = build(self.family)
        self.model = model.model if self.headless else model

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader([_batch_of_rank(self.family, dist.get_rank())], batch_size=None)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, output_router_logits=True, use_cache=False)
        if not self.headless:
            self.aux_loss = float(output.aux_loss.detach())
        return _loss_with_aux(output, output.get("aux_loss"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _batch_of_rank(family: str, rank: int) -> dict[str, Tensor]:
    return make_batch(family, 8 * (1 + rank), seed=rank)


def _loss_with_aux(output: Any, aux_loss: Tensor | None) -> Tensor:
    aux_loss = transformers_loss(output.router_logits, 8, 2) if aux_loss is None else aux_loss
    main = output.get("logits", output.get("last_hidden_state"))
    return (main * torch.linspace(-1, 1, main.shape[-1])).mean() + aux_loss


def _kept(family: str, ep: int, headless: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], float | None]:
    L.seed_everything(7, verbose=False)
    module, probe = Kept(family, headless=headless), Probe()
    trainer(MoEEPStrategy(ep=ep), max_epochs=1, callbacks=[probe]).fit(module)
    return probe.initial, probe.gradients[0], module.aux_loss


@pytest.mark.parametrize("headless", [False, True], ids=["the whole model", "the model without its head"])
@pytest.mark.parametrize(("family", "ep", "world"), [("qwen3_moe", 2, 2), ("mixtral", 2, 4), ("olmoe", 1, 2)])
def test_router_logits_survive(ranks: RankPool, family: str, ep: int, world: int, headless: bool) -> None:
    results = ranks.run(_kept, family, ep, headless, world=world)
    initial, ours, _ = results[0]
    model = build(family)
    model = model.model if headless else model
    model.set_experts_implementation("eager")
    model.load_state_dict(initial)
    for rank, (_, _, aux_loss) in enumerate(results):
        output = model(**_batch_of_rank(family, rank), output_router_logits=True)
        right = transformers_loss(output.router_logits, 8, 2)
        assert headless or aux_loss == pytest.approx(float(right.detach()), rel=1e-5)
        (_loss_with_aux(output, right) / world).backward()
    error, name = worst(ours, {n: p.grad for n, p in model.named_parameters()})
    assert error < 1e-5, f"the gradient of {name} is off by {error:.1e}"
