"""What a run will need, layout by layout, before it starts."""

from lightning_moe_ep.planning.machine import Machine, machine_of
from lightning_moe_ep.tools.plan.planner import plan
from lightning_moe_ep.tools.plan.report import Plan

__all__ = ["Machine", "Plan", "machine_of", "plan"]
