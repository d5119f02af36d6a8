"""MindSpore, as a rank asks for it by name. Its import starts threads, so it is left to methods."""

from __future__ import annotations

from typing import Any

from orchestrator.engine.api import Engine, GroupSpec
from orchestrator.engine.framework import Framework
from orchestrator.engine.mindspore.comm.scheduler import ahead
from orchestrator.engine.settings import EngineSettings


class MindSpore(Framework):
    """`engine.framework=mindspore`."""

    def form_group(self, spec: GroupSpec) -> Any:
        from orchestrator.engine.mindspore.comm.forming import form_group

        return form_group(spec)

    def build_engine(self, job: Any, settings: EngineSettings, group: Any) -> Engine:
        from orchestrator.engine.mindspore.building import build_engine

        return build_engine(job, settings, group)

    def versions(self) -> dict[str, str]:
        from orchestrator.engine.mindspore.building import versions

        return versions()

    def ahead(self, spec: GroupSpec) -> None:
        ahead(spec)
