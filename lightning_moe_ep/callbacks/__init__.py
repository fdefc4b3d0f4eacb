"""What a user adds to a Trainer."""

from lightning_moe_ep.callbacks.alerts import ExpertAlert
from lightning_moe_ep.callbacks.averaging import ShardedWeightAveraging, averaging_of
from lightning_moe_ep.callbacks.balance import ExpertBiasCallback
from lightning_moe_ep.callbacks.gradients import ExpertGradientCallback
from lightning_moe_ep.callbacks.load_report import LayerLoad, LoadReport
from lightning_moe_ep.callbacks.monitor import ExpertLoadMonitor
from lightning_moe_ep.callbacks.sentinel import SentinelCallback

__all__ = [
    "ExpertAlert",
    "ExpertBiasCallback",
    "ExpertGradientCallback",
    "ExpertLoadMonitor",
    "LayerLoad",
    "LoadReport",
    "SentinelCallback",
    "ShardedWeightAveraging",
    "averaging_of",
]
