"""Whether the ranks go on without those that are lost, now that group and job are there.

What was asked for and cannot be had is refused by the engine. Where nobody has said, it is off
then, and rank 0 says so.
"""

from __future__ import annotations

from typing import Any

from orchestrator.config.rules import OFF, planned_survival, with_survival
from orchestrator.config.schema import Config
from orchestrator.engine.api import Group, against
from orchestrator.rundir.warnings import warn


def agreed_survival(config: Config, job: Any, group: Group) -> Config:
    """`config` with `run.survive` true or false, alike on all ranks."""
    on = planned_survival(config).on
    if config.run.survive is None and on:
        refusal = against(job, group)
        if refusal and group.rank == 0:
            warn(f"{OFF}{refusal}")
        on = not refusal
    return with_survival(config, on=on and group.size > 1)
