"""From a plain model to a parallel one: experts first, then FSDP2.

A model and the meshes go in. Afterwards each rank holds its share of the experts (DTensors `Shard(0)` over ep), the
experts modules dispatch their tokens, and FSDP2 shards the rest over the dense mesh and each rank's experts over
efsdp. It is the one place that imports FSDP2's per-parameter mesh, which is private in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# Private; read at torch 2.13.0. A test fails when they move.
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from lightning_moe_ep.activation_checkpointing import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    wrap_forwards,
)
from lightning_moe_ep.checkpoint import load_pretrained
from lightning_moe_ep.context_parallel import ContextParallelMode, spread_attention, spread_over
from lightning_moe_ep.dispatch import CombineDtype, ExpertGroup, dispatch_here, dispatcher_class
from lightning_moe_ep.experts import (
    ROUTERS,
    Computation,
    ExpertsModule,
    RouterDtype,
    SpreadExperts,
    check_not_quantized,
    choice_biases,
    expert_parameters,
    find_experts,
    fit_outputs,
    is_spread,
    lone_expert_parameters,
    mark_spread,
    spread_experts,
    with_routers,
)
from lightning_moe_ep.experts import keep_router_logits as have_logits_kept
from lightning_moe_ep.fsdp import gather_anew_when_changed
from lightning_moe_ep.initialization import materialize
from lightning_moe_ep.kernels import apply_kernels, check_kernels, computation_for, kernel_named
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.lora import guard_peft
from lightning_moe_ep.mesh import Meshes
from lightning_moe_ep.towers import keep_ranks_together
from lightning_moe_ep.transformers_models import keep_methods
from lightning_moe_ep.units import find_units, shard_dim, stay_whole


def parallelize(
    model: nn.Module,
    meshes: Meshes,
    *,
    dispatcher: str = "auto",
    computation: Computation = "auto",
    combine_dtype: CombineDtype = "auto",
    equal_tokens: bool = False,
    reshard_after_forward: bool = True,
    activation_checkpointing: ActivationCheckpointing = "none",
    compile_blocks: bool = False,
    cpu_offload: bool = False,
    fp32_modules: Sequence[str] = (),
    cp_mode: ContextParallelMode = "ulysses",
    router_dtype: RouterDtype = "auto",
    keep_router_logits: bool = False,
    kernels: Sequence[str] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    roots: Sequence[nn.Module] | None = None,
    pretrained: str | Path | None = None,
    read_ahead: bool = False,
) -> None:
    """Spread the experts of `model` over ep and shard everything with FSDP2, in place.

    The biases that routers choose by (see `ExpertBiasCallback`) stay whole on every rank, in fp32.

    Args:
        model: a plain model, on the meta device or real (then whole and equal on every rank).
        meshes: where to; see `build_meshes`.
        dispatcher: the registered name of the dispatcher.
        computation: how experts compute, see `compute_experts`.
        combine_dtype: in which dtype experts' sums are sent; see `CombineDtype`.
        equal_tokens: promise that all ranks of an ep group have equally many tokens in every forward, which saves a
            small exchange over the host in each experts layer.
        reshard_after_forward: whether blocks free their gathered weights between forward and backward.
        activation_checkpointing: what of a block is kept for backward; see `MoEEPStrategy`.
        compile_blocks: whether the forward of each block is compiled by `torch.compile`; experts and their exchange
            stay outside of the graphs.
        cpu_offload: keep what FSDP2 shards in memory of the host, and compute the optimizer's step there.
        fp32_modules: names of modules, or ends of their paths, that are gathered and computed in fp32, whatever the
            mixed precision of the rest; they must be called. What they return is fp32.
        cp_mode: at cp > 1, how attention sees whole sequences; see `ContextParallelMode`.
        router_dtype: "float32" does the same for all routers, which are found by what they hold.
        keep_router_logits: whether routers keep the logits of each forward; see `router_logits`.
        kernels: names of attention and experts implementations of transformers, "liger" and "fla"; see `MoEEPStrategy`.
        mp_policy: FSDP2's mixed precision; its output dtype is applied at the roots only.
        roots: the modules that are called from outside, if `model` itself is not.
        pretrained: a Hugging Face folder; the transformers model that `model` is, or holds, is filled from it, each
            rank reading its share (see `load_pretrained`, for its errors too).
        read_ahead: whether its files are read ahead.

    Raises:
        NoExpertsError: the model has no experts module.
        NotImplementedError: weights are quantised, an adapter is of a kind that cannot be spread, a router that is to
            be in fp32 is not called as a module, or at cp > 1 tokens meet elsewhere than in an attention that goes
            through transformers' attention interface.
        ValueError: ep does not divide the number of experts, the model is parallel already, a parameter is shared
            between modules that FSDP2 would shard apart, an option has a value that there is not, or no module has one
            of these names, or it holds experts, or a router is not found; or a kernel that the model or the device
            cannot have is asked for.
        ImportError: what a kernel takes is not installed.
    """
    check_options(dispatcher=dispatcher, computation=computation, combine_dtype=combine_dtype, cp_mode=cp_mode)
    check_kernels(kernels)
    computation = computation_for(kernels, computation)
    fp32_modules = with_routers(fp32_modules, router_dtype)
    check_activation_checkpointing(activation_checkpointing)
    check_not_quantized(model)
    experts = find_experts(model)
    for found in experts:
        if is_spread(found.module):
            raise ValueError(f"the experts of {found.name} are spread already; parallelize a model once")
        if computation not in found.adapter.computations:
            chosen = [f"kernels has {name!r}, so that " for name in kernels if kernel_named(name).kind == "experts"]
            raise ValueError(
                f"{''.join(chosen)}computation={computation!r} is not known to the experts of {found.name}"
                f" ({type(found.module).__name__}); use one of {sorted(found.adapter.computations)}"
            )
    apply_kernels(model, kernels, device_type=meshes.dense.device_type)
    meshes.layout.check_experts({found.name: found.num_experts for found in experts})
    if meshes.layout.cp > 1:
        spread_attention(model, meshes, mode=cp_mode)
    for found in experts:
        found.adapter.prepare()
    make_dispatcher = dispatcher_class(dispatcher)
    policy = mp_policy or MixedPrecisionPolicy()
    units = find_units(model, experts, roots=roots, fp32_modules=fp32_modules, policy=policy)
    roots, blocks = units.roots, units.blocks

    biases = _keep_choice_biases(model, torch.device(meshes.dense.device_type))
    for found in experts:
        spread = _spread(found, meshes, policy, offloaded=cpu_offload, compiled=compile_blocks)
        spread.chosen.update(
            fp32_modules=list(fp32_modules), keep_router_logits=keep_router_logits, kernels=list(kernels)
        )
        compute = partial(found.adapter.compute, computation=computation)
        dispatch: Callable[..., Tensor] = partial(dispatch_here, experts=compute, num_experts=found.num_experts)
        if meshes.host_ep_group is not None:
            group = ExpertGroup(
                group=meshes.ep_mesh.get_group(),
                host_group=meshes.host_ep_group,
                num_experts=found.num_experts,
                combine_dtype=combine_dtype,
                statistics=spread.statistics,
                equal_tokens=equal_tokens and found.adapter.equal_tokens,
            )
            dispatch = partial(make_dispatcher(group), experts=compute)
        # Not a part of any graph: what it tells other ranks and asks of the host is of that moment.
        as_it_is = computation in ("auto", "native") or not found.adapter.by_compute_experts
        dispatch = torch.compiler.disable(spread.routing(found.adapter.completed(dispatch)))
        found.adapter.install(dispatch, alone=meshes.host_ep_group is None and as_it_is)

    inner_policy = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
    placement = _expert_placement(expert_parameters(model), meshes)
    whole = {*lone_expert_parameters(model), *biases}
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    if ROUTERS in fp32_modules and units.in_fp32:
        fit_outputs(model, policy.param_dtype or next(units.blocks[0].parameters()).dtype)
    for module in units.in_fp32:
        for parameter in module.parameters():
            parameter.data = parameter.data.float()
        fully_shard(
            module,
            mesh=meshes.dense,
            reshard_after_forward=reshard_after_forward,
            mp_policy=fp32,
            offload_policy=offload,
            ignored_params=whole,
        )
    wrap_forwards(blocks, activation_checkpointing=activation_checkpointing, compiles=compile_blocks)
    shard = partial(
        fully_shard,
        mesh=meshes.dense,
        offload_policy=offload,
        shard_placement_fn=placement,
        ignored_params=whole,
    )
    for block in blocks:
        if block not in roots:
            shard(block, reshard_after_forward=reshard_after_forward, mp_policy=inner_policy)
    for root in roots:
        # None: a root keeps its own weights gathered until backward, which needs them first. A root that is a block
        # (a LightningModule that holds its layers in a list of its own) is one of many, and must not.
        shard(root, reshard_after_forward=reshard_after_forward if root in blocks else None, mp_policy=policy)
    gather_anew_when_changed(model)
    keep_methods(model, roots)
    guard_peft(model)
    keep_ranks_together(model, roots, units.sequences, meshes.host_group)
    if meshes.layout.fsdp > 1:
        for sequence in units.sequences:
            _prefetch([block for block in sequence if block not in roots])
    if keep_router_logits:
        have_logits_kept(model, roots, meshes.host_group)
    if pretrained is not None:
        device = torch.device(meshes.dense.device_type)
        load_pretrained(model, pretrained, device=device, read_ahead=read_ahead)
        materialize(model, seed=0, device=device)  # buffers that are computed, not saved


def check_options(*, dispatcher: str, computation: str, combine_dtype: str, cp_mode: str = "ulysses") -> None:
    """Check what is chosen by name, so that a misspelt one does not stand for another.

    Raises:
        ValueError: there is no such dispatcher, computation, combine_dtype or cp_mode; lists those that there are.
        NotImplementedError: a dispatcher that is not supported.
    """
    dispatcher_class(dispatcher)
    for name, value, choices in (
        ("computation", computation, get_args(Computation)),
        ("combine_dtype", combine_dtype, get_args(CombineDtype)),
        ("cp_mode", cp_mode, get_args(ContextParallelMode)),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not known; use one of {list(choices)}")


def check_parallelized(
    model: nn.Module, layout: Layout, policy: MixedPrecisionPolicy, options: Mapping[str, Any]
) -> None:
    """Check that a model that is parallel already is so as a strategy would have it.

    Raises:
        ValueError: its experts are spread over another ep, or were given another precision, or its attention is spread
            over another cp; or options ask for what it was not given: routers in fp32, their logits, or kernels.
    """
    if (cp := spread_over(model)) != layout.cp:
        raise ValueError(
            f"the model is parallel already, with attention for cp={cp}, but this strategy has cp={layout.cp}; use the"
            " same cp, or build the model anew and load a checkpoint"
        )
    for _, spread in spread_experts(model):
        if spread.ep != layout.ep:
            raise ValueError(
                f"the experts of {spread.name} are spread over ep={spread.ep} already, but this strategy has"
                f" ep={layout.ep}; use the same ep, or build the model anew and load a checkpoint"
            )
        if spread.mp_policy != policy:
            raise ValueError(
                f"the experts of {spread.name} were parallelized with {spread.mp_policy}, but the Trainer's precision"
                f" asks for {policy}; call `self.trainer.strategy.parallelize(model)`, which passes it on"
            )
        for name, given in spread.chosen.items():
            if (asked := options[name]) and asked != given:
                raise ValueError(
                    f"the model is parallel already, with {name}={given}, but this strategy has {asked}; call"
                    " `self.trainer.strategy.parallelize(model)`, which passes it on, or build the model anew and load"
                    " a checkpoint"
                )


def _prefetch(blocks: Sequence[nn.Module]) -> None:
    """Gather the next block's weights before a block runs.

    The host waits once in each experts layer, for the counts, and so cannot issue the next gather early by itself.
    A block that is a root shares nothing with the others, and cannot be prefetched.
    """
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def _spread(
    found: ExpertsModule, meshes: Meshes, policy: MixedPrecisionPolicy, *, offloaded: bool, compiled: bool
) -> SpreadExperts:
    """Leave this rank's slice of the experts on the module, as DTensors over ep (plain tensors at ep=1)."""
    parameters = {name: found.module.get_parameter(name) for name in found.adapter.parameters}
    by_fsdp = offloaded or not stay_whole((p.dtype for p in parameters.values()), meshes.layout, policy)
    ep, first = meshes.layout.ep, 0
    if ep > 1:
        mesh = meshes.ep_mesh
        first = mesh.get_local_rank() * (found.num_experts // ep)
        for name, parameter in parameters.items():
            device = parameter.device if parameter.is_meta else torch.device(mesh.device_type)
            # A copy, so that the storage of all E experts can be freed.
            local = parameter.detach().chunk(ep)[mesh.get_local_rank()].to(device, copy=True)
            sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            owner, _, key = name.rpartition(".")
            sharded = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            found.module.get_submodule(owner).register_parameter(key, sharded)
    spread = SpreadExperts(
        name=found.name,
        adapter=found.adapter,
        num_experts=found.num_experts,
        ep=ep,
        first=first,
        mp_policy=policy,
        by_fsdp=by_fsdp,
        host_group=meshes.host_group,
        compiled=compiled,
    )
    mark_spread(found.module, spread)
    return spread


def _keep_choice_biases(model: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Hold the biases that routers choose by in fp32; returns those that are parameters, for FSDP2 to leave alone.

    It would gather them in the dtype of the forward, and choosing by a bias in bf16 is choosing by a coarse one.
    """
    biases = choice_biases(model)
    for bias in biases:
        bias.keep_fp32(device)
    return [bias.tensor for bias in biases if isinstance(bias.tensor, nn.Parameter)]


def _expert_placement(
    experts: Sequence[nn.Parameter], meshes: Meshes
) -> Callable[[nn.Parameter], ShardPlacementResult | None] | None:
    """FSDP2's placement function: experts over efsdp, all else by default (over the dense mesh)."""
    if meshes.layout.ep == 1:
        # torch 2.13: two FSDPMeshInfo over one process group raise ValueError, and here the meshes would be equal.
        return None
    mesh = meshes.efsdp_mesh
    info = (
        HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        if meshes.layout.replicate > 1
        else FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    )
    of_experts = {id(parameter) for parameter in experts}

    def placement(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if id(parameter) not in of_experts:
            return None
        dim = shard_dim(parameter._local_tensor.shape, meshes.layout.efsdp)
        return ShardPlacementResult(placement=Shard(dim), mesh_info=info)

    return placement
