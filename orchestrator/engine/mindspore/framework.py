"""MindSpore, as a rank asks for it by name. Its import starts threads, so it is left to methods."""

from __future__ import annotations

from typing import Any

from orchestrator.engine.api import Engine, EngineSettings, Framework, GroupSpec
from orchestrator.engine.mindspore.rendezvous import ahead


class MindSpore(Framework):
    """The framework `mindspore`."""

    def form_group(self, spec: GroupSpec) -> Any:
        from orchestrator.engine.mindspore.group import form_group

        return form_group(spec)

    def build_engine(self, job: Any, settings: EngineSettings, group: Any) -> Engine:
        from orchestrator.engine.mindspore.engine import build_engine

        return build_engine(job, settings, group)

    def versions(self) -> dict[str, str]:
        from orchestrator.engine.mindspore.engine import versions

        return versions()

    def ahead(self, spec: GroupSpec) -> None:
        ahead(spec)
