"""Is a run right? One step of it on its own ranks, and once in one process, compared."""

from lightning_moe_ep.tools.verify.command import DESCRIPTION, command, verify
from lightning_moe_ep.tools.verify.report import VerifyReport

__all__ = ["DESCRIPTION", "VerifyReport", "command", "verify"]
