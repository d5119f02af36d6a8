"""torch, as a rank asks for it by name."""

from __future__ import annotations

from typing import Any

from orchestrator.engine.api import Engine, GroupSpec
from orchestrator.engine.framework import Framework
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch.checks.at_start.versions import versions
from orchestrator.engine.torch.comm.base_group import BaseGroup
from orchestrator.engine.torch.engine import build_engine
from orchestrator.engine.torch.rendezvous.forming import form_group
from orchestrator.engine.torch.surviving import SurvivingEngine


class Torch(Framework):
    """`engine.framework=torch`."""

    def form_group(self, spec: GroupSpec) -> BaseGroup:
        return form_group(spec)

    def build_engine(self, job: Any, settings: EngineSettings, group: BaseGroup) -> Engine:
        kind = SurvivingEngine if settings.survive else build_engine
        return kind(job, settings, group)

    def versions(self) -> dict[str, str]:
        return versions()
