"""Expert parallelism as a Lightning strategy."""

from lightning_moe_ep.strategy.moe_ep import MoEEPStrategy, register_strategies

__all__ = ["MoEEPStrategy", "register_strategies"]
