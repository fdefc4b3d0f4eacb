"""Experts modules that need an adapter of their own; importing this registers them."""

from lightning_moe_ep.experts.families import dbrx, ernie4_5_vl_moe, jetmoe, llama4, longcat_flash, switch

__all__ = ["dbrx", "ernie4_5_vl_moe", "jetmoe", "llama4", "longcat_flash", "switch"]
