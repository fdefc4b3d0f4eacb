"""What a user adds to a Trainer."""

from lightning_moe_ep.callbacks.averaging import ShardedWeightAveraging, averaging_of
from lightning_moe_ep.callbacks.balance import ExpertBiasCallback
from lightning_moe_ep.callbacks.gradients import ExpertGradientCallback

__all__ = ["ExpertBiasCallback", "ExpertGradientCallback", "ShardedWeightAveraging", "averaging_of"]
