"""Expert parallelism for PyTorch Lightning."""

import logging

from lightning_moe_ep.balance import load_balancing_loss
from lightning_moe_ep.callbacks import (
    ExpertAlert,
    ExpertBiasCallback,
    ExpertGradientCallback,
    ExpertLoadMonitor,
    SentinelCallback,
    ShardedWeightAveraging,
)
from lightning_moe_ep.causal_lm import CausalLMModule
from lightning_moe_ep.checkpoint import LoadReport, build_pretrained, load_pretrained
from lightning_moe_ep.checkpoint.convert import convert_to_file, convert_to_folder
from lightning_moe_ep.checkpoint.export import export_to_hugging_face
from lightning_moe_ep.checkpoint.export_callback import HuggingFaceExport
from lightning_moe_ep.checkpoint.opening import open_folders
from lightning_moe_ep.data import TextDataModule, split_by_rank
from lightning_moe_ep.dispatch import Dispatcher, register_dispatcher, remember_exchange, remember_routing
from lightning_moe_ep.experts import (
    Dispatch,
    ExpertsAdapter,
    GroupedExperts,
    MoELayer,
    Routing,
    SharedExpert,
    TopKRouter,
    record_routing,
    register_experts,
    replay_routing,
    router_logits,
    spread_experts,
)
from lightning_moe_ep.gradients import grad_norm
from lightning_moe_ep.initialization import materialize
from lightning_moe_ep.layout import Layout
from lightning_moe_ep.lora import merged_model, save_adapter
from lightning_moe_ep.mesh import Meshes, build_meshes
from lightning_moe_ep.optimizers import parameter_groups
from lightning_moe_ep.other_lightning import name_the_import
from lightning_moe_ep.parallelize import parallelize
from lightning_moe_ep.strategy import MoEEPStrategy, register_strategies
from lightning_moe_ep.tools.plan import Machine, Plan, machine_of, plan
from lightning_moe_ep.tools.verify import VerifyReport, verify

__version__ = "0.1.0"

__all__ = [
    "CausalLMModule",
    "Dispatch",
    "Dispatcher",
    "ExpertAlert",
    "ExpertBiasCallback",
    "ExpertGradientCallback",
    "ExpertLoadMonitor",
    "ExpertsAdapter",
    "GroupedExperts",
    "HuggingFaceExport",
    "Layout",
    "LoadReport",
    "Machine",
    "Meshes",
    "MoEEPStrategy",
    "MoELayer",
    "Plan",
    "Routing",
    "SentinelCallback",
    "ShardedWeightAveraging",
    "SharedExpert",
    "TextDataModule",
    "TopKRouter",
    "VerifyReport",
    "build_meshes",
    "build_pretrained",
    "convert_to_file",
    "convert_to_folder",
    "export_to_hugging_face",
    "grad_norm",
    "load_balancing_loss",
    "load_pretrained",
    "machine_of",
    "materialize",
    "merged_model",
    "parallelize",
    "parameter_groups",
    "plan",
    "record_routing",
    "register_dispatcher",
    "register_experts",
    "remember_exchange",
    "remember_routing",
    "replay_routing",
    "router_logits",
    "save_adapter",
    "split_by_rank",
    "spread_experts",
    "verify",
]

register_strategies()
open_folders()
name_the_import()

# As Lightning does with its own: choices that the library makes are seen without any logging set up.
_log = logging.getLogger(__name__)
_log.addHandler(logging.StreamHandler())
_log.setLevel(logging.INFO)
_log.propagate = False
