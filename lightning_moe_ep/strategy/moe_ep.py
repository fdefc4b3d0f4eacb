"""`MoEEPStrategy`: expert parallelism as a Lightning strategy.

Each hook is a few lines into the rooms below: the layout and its meshes, parallelizing the user's model, initial
weights, gradients, checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, NoReturn

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ep import checkpoint as checkpoints
from lightning_moe_ep.activation_checkpointing import (
    ActivationCheckpointing,
    check_activation_checkpointing,
)
from lightning_moe_ep.callbacks import ExpertGradientCallback, averaging_of
from lightning_moe_ep.context_parallel import ContextParallelMode, gather_sequences, shard_sequences
from lightning_moe_ep.data import Uneven
from lightning_moe_ep.dispatch import CombineDtype
from lightning_moe_ep.experts import Computation, RouterDtype, ep_size, lone_expert_parameters, with_routers
from lightning_moe_ep.fsdp import reshard
from lightning_moe_ep.gradients import is_replicated
from lightning_moe_ep.initialization import broadcast_seed, make_replicas_equal, materialize, seeded
from lightning_moe_ep.kernels import check_kernels, computation_for
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.mesh import Meshes, build_meshes, let_gloo_finish_at_exit
from lightning_moe_ep.optimizers import check_finetuning
from lightning_moe_ep.other_lightning import called_by_the_other_lightning
from lightning_moe_ep.parallelize import (
    check_options,
    check_parallelized,
    parallelize,
)
from lightning_moe_ep.precision import FSDP2Precision, refuse_fp16_in_disguise
from lightning_moe_ep.strategy.choosing import ChoosingStrategy
from lightning_moe_ep.strategy.loading import LoadingStrategy
from lightning_moe_ep.strategy.logs import LoggingStrategy, log_kernels, tell_parameters
from lightning_moe_ep.strategy.stepping import SteppingStrategy
from lightning_moe_ep.units import top_level_modules


class MoEEPStrategy(ChoosingStrategy, LoadingStrategy, LoggingStrategy, SteppingStrategy):
    """Experts spread over the ranks, everything else under FSDP2."""

    def __init__(
        self,
        ep: int | Literal["auto"] = "auto",
        replicate: int = 1,
        cp: int = 1,
        cp_mode: ContextParallelMode = "ulysses",
        dispatcher: str = "auto",
        computation: Computation = "auto",
        combine_dtype: CombineDtype = "auto",
        equal_tokens: bool = False,
        init_on_meta: bool = False,
        reshard_after_forward: bool = True,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile_blocks: bool = False,
        cpu_offload: bool = False,
        fp32_modules: Sequence[str] = (),
        router_dtype: RouterDtype = "auto",
        keep_router_logits: bool = False,
        kernels: Sequence[str] = (),
        reduce_every_micro_batch: bool = False,
        uneven: Uneven = "stop",
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        """
        Args:
            ep: Number of ranks that share one full set of experts. "auto": on GPUs the one with the shortest step by
                `plan`'s arithmetic, among those that fit, where the data module has block_size and batch_size; else
                the largest, at most the devices of a node, that divides the world (per replica) and all experts.
            replicate: Number of copies of the whole sharded model, as in hybrid-sharded data parallelism.
            cp: Number of consecutive ranks over which each sequence is cut, for sequences that do not fit a rank. They
                are given the same samples, and share weights and experts as any other ranks.
            cp_mode: How attention sees the whole sequence: "ulysses" exchanges heads for tokens and back, "ring" passes
                keys and values around (torch's own context parallel, on GPUs, for causal attention without padding).
            dispatcher: How tokens reach their experts: "all_gather", "all_to_all", "overlapped", "auto" (the cheaper
                of the first two by a cost model), or the name of a registered dispatcher.
            computation: How experts compute: "grouped_mm", "loop", "native" (the module's own forward: transformers'
                `experts_implementation`), or "auto" for grouped_mm where sizes admit it.
            combine_dtype: The dtype in which experts' sums are sent: "float32", that of the "input", or "auto":
                float32 where the network adds them up (all_gather), else that of the input.
            equal_tokens: Promise that all ranks have equally many tokens in every forward; saves a small exchange
                over the host in each experts layer. A broken promise hangs or fails in a collective.
            init_on_meta: Run `configure_model` on the meta device, and make each rank's part of the initial weights
                only. For models whose modules initialise themselves (`reset_parameters`, or transformers').
            reshard_after_forward: Free a block's gathered weights after forward and gather them again in backward.
            activation_checkpointing: What of a transformer block is kept for backward: "none": everything is. "full":
                its inputs, and which experts were chosen; the rest is computed, and rows are exchanged, again.
                "selective": also the rows that came from other ranks, so that nothing is exchanged twice.
            compile_blocks: Compile each transformer block with `torch.compile`; experts and their exchange stay
                outside of the graphs.
            cpu_offload: Keep weights, gradients and optimizer state in memory of the host, as FSDP2 does, and compute
                the optimizer's step there.
            fp32_modules: Modules that are kept in fp32, and compute in it, in bf16-true and bf16-mixed: by the end of
                their paths, such as "mlp.gate" for the routers of Qwen3-MoE.
            router_dtype: "float32": routers, which are found by what they hold, are kept in fp32 and compute in it, in
                bf16-true and bf16-mixed. "auto": as the precision says.
            keep_router_logits: Keep what routers say of all experts, `[T, E]` a layer, until the next forward, for a
                loss of your own: `router_logits(module)` reads it.
            kernels: What models of transformers compute with, by name: an attention ("sdpa", "flash_attention_2", ...),
                an experts implementation ("batched_mm", "experts:eager", ...; `computation` is "native" then), "liger"
                (norms, and a loss fused with the head), "fla" or "fla:32" (flash-linear-attention, and its chunks).
            reduce_every_micro_batch: Reduce gradients in every micro-batch of an accumulation window, which needs
                less memory, instead of once per optimizer step.
            uneven: What comes of unequal numbers of batches in training, validation and test: all ranks "stop" with
                the first that has no more, and tell which it was and what the others drop; or raise an "error".
                `predict` drops nothing.
            save_distributed_checkpoint: Save a folder that all ranks write, instead of one file with whole tensors.
            async_save: Copy what is saved to memory of the host, and write it while training goes on. A failure is
                raised at the next step, or at the end. A second save waits for the first: let ModelCheckpoint have
                `save_last="link"`, as `save_last=True` saves twice.
            process_group_backend: The backend of torch.distributed; None: nccl on GPUs, gloo on CPUs.
            timeout: How long a collective may take.

        Raises:
            ValueError: ep, replicate or cp is not a positive integer; there is no such cp_mode, dispatcher,
                computation, combine_dtype, router_dtype, activation_checkpointing, uneven or kernel; two kernels are
                for the same thing; or async_save is asked for with save_distributed_checkpoint=False.
            ImportError: What a kernel takes is not installed.
        """
        if ep != "auto" and (not isinstance(ep, int) or isinstance(ep, bool) or ep < 1):
            raise ValueError(f"ep={ep!r} must be a positive number of ranks, or 'auto'")
        for name, size, of in (("replicate", replicate, "copies"), ("cp", cp, "ranks")):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r} must be a number of {of}, at least 1")
        check_options(dispatcher=dispatcher, computation=computation, combine_dtype=combine_dtype, cp_mode=cp_mode)
        check_activation_checkpointing(activation_checkpointing)
        check_kernels(kernels)
        super().__init__(
            uneven=uneven,
            save_distributed_checkpoint=save_distributed_checkpoint,
            async_save=async_save,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.ep = ep
        self.replicate = replicate
        self.cp = cp
        self.parallelize_options: dict[str, Any] = {
            "cp_mode": cp_mode,
            "dispatcher": dispatcher,
            "computation": computation_for(kernels, computation),
            "combine_dtype": combine_dtype,
            "equal_tokens": equal_tokens,
            "reshard_after_forward": reshard_after_forward,
            "activation_checkpointing": activation_checkpointing,
            "compile_blocks": compile_blocks,
            "cpu_offload": cpu_offload,
            "fp32_modules": with_routers(fp32_modules, router_dtype),
            "keep_router_logits": keep_router_logits,
            "kernels": list(kernels),
        }
        """What `parallelize` is called with, beside the meshes and the precision."""
        self.init_on_meta = init_on_meta
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self.gradients = ExpertGradientCallback()
        """The gradient callback in use: the user's own, or this one."""
        self._meshes: Meshes | None = None
        self._seed: int | None = None

    def __repr__(self) -> str:
        # What Fabric, and the Trainer of pytorch_lightning, say that they do not know.
        return called_by_the_other_lightning(type(self).__name__) or (
            f"MoEEPStrategy(ep={self.ep!r}), for lightning.pytorch.Trainer (for Fabric: lightning_moe_ep.parallelize)"
        )

    # What a LightningModule may ask.

    @property
    def layout(self) -> Layout:
        """The sizes of the mesh dimensions."""
        return self.meshes.layout

    @property
    @override
    def meshes(self) -> Meshes:
        """The meshes, for a module that calls `parallelize` itself in `configure_model`.

        Raises:
            RuntimeError: before the processes are set up, or, with ep="auto", before the model is known.
        """
        if self._meshes is None:
            raise RuntimeError(
                "there are no meshes yet: with ep='auto' they are built once `configure_model` has returned, so give"
                " ep as a number to call `parallelize` there"
                if self.ep == "auto"
                else "there are no meshes before the processes are set up"
            )
        return self._meshes

    def parallelize(self, model: nn.Module, *, roots: Sequence[nn.Module] | None = None) -> None:
        """`parallelize` with this strategy's meshes, precision and options, for a module's own `configure_model`.

        Args:
            model: a plain model; afterwards it is spread and sharded.
            roots: the modules that are called from outside, if `model` itself is not.
        """
        policy = self.precision_plugin.policy
        parallelize(model, self.meshes, mp_policy=policy, roots=roots, **self.parallelize_options)

    def shard_sequences(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's slice of a batch of whole sequences, for a module's own steps; see `context_parallel.slicing`.

        At cp=1 it has the whole sequences in the same form, so a module needs no second way.
        """
        return shard_sequences(batch, rank=self.meshes.cp_rank, size=self.cp)

    def gather_sequences(self, sliced: Tensor, *, length: int) -> Tensor:
        """Whole sequences `[B, length, ...]` from what each rank made of its slice, without gradients, on all of them.

        For a `predict_step`, of whose outputs those of the first rank of a cp group are kept.
        """
        group = None if self.cp == 1 else self.meshes.cp_mesh.get_group()
        return gather_sequences(sliced, length=length, group=group)

    @property
    def materializes_meta(self) -> bool:
        """That a model may be left on the meta device: this strategy makes its initial weights."""
        return True

    # Before the model exists.

    @property
    @override
    def precision_plugin(self) -> FSDP2Precision:
        plugin = FSDP2Precision.from_plugin(super().precision_plugin)
        self._precision_plugin: FSDP2Precision | None = plugin
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        refuse_fp16_in_disguise()
        self._precision_plugin = None if plugin is None else FSDP2Precision.from_plugin(plugin)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        # The first moment at which the world's size is known, and in the Trainer's constructor.
        world = self.num_nodes * self.num_processes
        Layout.for_world(world, ep=1 if self.ep == "auto" else self.ep, replicate=self.replicate, cp=self.cp)

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        if not dist.is_initialized():
            self._seed = None
            let_gloo_finish_at_exit()
        self._setup_distributed()
        if self._seed is None:
            self._seed = broadcast_seed(int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32)))
        if self.ep != "auto":
            self._build_meshes(self.ep)
        trainer = self.lightning_module.trainer
        self.gradients = self.gradients.put_first(trainer)
        self.precision_plugin.gradients = self.gradients
        averaging_of(trainer)  # refuses what cannot work
        check_finetuning(trainer)
        self._saver.adopt(trainer, lambda: self.meshes.all_groups)
        # FSDP2 keeps tensors from one run to the next, and those of inference mode cannot be trained on.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    def _build_meshes(self, ep: int) -> None:
        assert self.lightning_module is not None
        layout = Layout.for_world(self.world_size, ep=ep, replicate=self.replicate, cp=self.cp)
        self._meshes = build_meshes(layout, self.root_device.type, timeout=self._timeout)
        self._device_mesh = self._meshes.expert or self._meshes.dense
        self.lightning_module._device_mesh = self._device_mesh

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with super().tensor_init_context(self.init_on_meta if empty_init is None else empty_init):
            yield

    # The model: the user's plain one goes in, the parallel one comes out.

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        assert self.lightning_module is not None and self._seed is not None
        # Without a common seed every rank would draw other weights.
        same_seed = nullcontext() if "PL_GLOBAL_SEED" in os.environ else seeded(self._seed, self.root_device)
        with same_seed:
            yield
        with self.root_device:  # not the meta device, which may be the default here
            self._parallelize()
        # Run again (validate after fit), it would put a new model in place of the trained one.
        self.lightning_module.configure_model = lambda: None

    def _parallelize(self) -> None:
        module = self.lightning_module
        assert module is not None
        if any(not is_replicated(parameter) for parameter in module.parameters()):
            self._check_layout_of(module)
            return
        self.precision_plugin.fp32_modules = self.parallelize_options["fp32_modules"]
        module = self.precision_plugin.convert_module(module)
        if self.ep == "auto":
            ep = self._choose_ep(module, self.precision_plugin.precision)
            self._build_meshes(ep)
        if differing := make_replicas_equal(module, device=self.root_device):
            rank_zero_warn(
                f"{len(differing)} parameter(s) and buffer(s) differed between ranks, {differing[0]} first; rank 0's"
                " were sent to all. Call seed_everything, or build the model in configure_model, to avoid it"
            )
        real = sum(
            parameter.numel() * parameter.element_size() for parameter in module.parameters() if not parameter.is_meta
        )
        if real:
            rank_zero_info(f"The model was built whole on each rank ({real / 2**20:,.0f} MiB) and is cut from there")
        self.parallelize(module, roots=top_level_modules(module))

    def _check_layout_of(self, module: nn.Module) -> None:
        if self.ep == "auto" and self._meshes is None:
            self._build_meshes(ep_size(module))
        check_parallelized(module, self.layout, self.precision_plugin.policy, self.parallelize_options)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module = self.lightning_module
        assert module is not None and self.accelerator is not None and self._seed is not None
        self.accelerator.setup(trainer)
        self._parallelize()  # does nothing, unless the model was built in `__init__`
        reshard(module)  # an evaluation leaves the roots' weights gathered
        # What is offloaded must not have to fit on the device on its way.
        home = torch.device("cpu") if self.parallelize_options["cpu_offload"] else self.root_device
        checkpoints.read_pretrained(module, device=home)
        materialize(module, seed=self._seed, device=home)
        self.model_to_device()
        self._log_whole_values(module)
        for parameter in module.parameters():
            if is_replicated(parameter):
                dist.broadcast(parameter.detach(), src=0)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            tell_parameters(trainer, module)
            log_kernels(trainer, self.parallelize_options["kernels"])
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        module = self.lightning_module
        assert module is not None
        if not self.parallelize_options["cpu_offload"]:
            super().model_to_device()
            return
        stay = {id(p) for p in module.parameters() if not is_replicated(p)}
        stay -= {id(p) for p in lone_expert_parameters(module)}
        module._apply(lambda tensor: tensor if id(tensor) in stay else tensor.to(self.root_device))

    @override
    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        # Offloaded gradients and weights are summed, gathered and saved where they are.
        return "cpu:gloo,cuda:nccl" if backend == "nccl" and self.parallelize_options["cpu_offload"] else backend


def _not_for_fabric(**_: Any) -> NoReturn:
    raise NotImplementedError(
        "Fabric has no expert-parallel strategy: give MoEEPStrategy to a lightning.pytorch.Trainer, or call"
        " lightning_moe_ep.parallelize(model, build_meshes(...)) yourself, which needs neither"
    )


def register_strategies() -> None:
    """Make `Trainer(strategy="moe_ep")` and `"moe_ep_1"` to `"moe_ep_64"` work; Fabric says why not."""
    for name, ep in [("moe_ep", "auto"), *((f"moe_ep_{2**power}", 2**power) for power in range(7))]:
        description = f"Expert parallelism with FSDP2, ep={ep}"
        StrategyRegistry.register(name, MoEEPStrategy, description=description, override=True, ep=ep)
        STRATEGY_REGISTRY.register(name, _not_for_fabric, description=description, override=True)
