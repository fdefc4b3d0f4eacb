"""The verdict on a run, for people and for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from lightning_moe_ep.faults import Fault
from lightning_moe_ep.tools.verify.judge import Check


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found."""

    layouts: list[str]
    """Those that were run: the run's own, and the one that its checkpoint was loaded at."""

    device: str
    """The kind of device that the ranks ran on."""

    parameters: int
    """Of the model that was compared."""

    changes: list[str]
    """What of the run was cut or set for it, a line each."""

    checks: list[Check]
    """Each comparison, with its largest error."""

    faults: list[Fault]
    """What is wrong; nothing if the run is right."""

    seconds: float
    """That it took."""

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def text(self) -> str:
        """The report for people; the last line is the verdict."""
        lines = [
            f"Two steps in fp32 on {self.device}, compared with one process: {self.layouts[0]}, then resumed at"
            f" {self.layouts[1]}; {self.parameters:,} parameters, {self.seconds:.0f} s",
            *(f"  {line}" for line in self.changes),
            "",
            "largest errors, as shares of the largest value:",
        ]
        layouts = dict.fromkeys(check.layout for check in self.checks)
        for layout in layouts:
            lines.append(f"{layout}:")
            of_layout = [check for check in self.checks if check.layout == layout]
            lines += [f"  {check.error:7.1e}  {check.what:<34}  {check.at}".rstrip() for check in of_layout]
        lines.append("")
        lines += [f"WRONG: {fault.text}" for fault in self.faults] or ["Nothing wrong was found."]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an error that has no number is None."""
        values = {**asdict(self), "right": self.right}
        for check in values["checks"]:
            check["error"] = check["error"] if math.isfinite(check["error"]) else None
        return values

    @classmethod
    def from_json(cls, text: str) -> VerifyReport:
        """The inverse of `as_dict`, out of JSON."""
        values = json.loads(text)
        del values["right"]
        for check in values["checks"]:
            check["error"] = math.inf if check["error"] is None else check["error"]
        return cls(
            **{
                **values,
                "checks": [Check(**check) for check in values["checks"]],
                "faults": [Fault(**fault) for fault in values["faults"]],
            }
        )
