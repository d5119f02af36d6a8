"""What a rank needs of a framework, found by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from orchestrator.engine.api import Engine, GroupSpec
from orchestrator.engine.settings import EngineSettings


class Framework(ABC):
    """What a rank needs of a framework: one class, made without arguments.

    Somebody else's is found through the entry points `orchestrator.frameworks`, by the name that a
    job's `framework` says. Its module is imported before ranks are forked on this machine: what
    starts threads or takes a device waits for its methods.
    """

    @abstractmethod
    def form_group(self, spec: GroupSpec) -> Any:
        """A `Group` of all ranks. Collective; every rank gets one, or the same error."""

    @abstractmethod
    def build_engine(self, job: Any, settings: EngineSettings, group: Any) -> Engine:
        """The engine that trains a job over a group of `form_group`. Collective."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """What decides the bits of a run on the framework's side, by name."""

    def ahead(self, spec: GroupSpec) -> None:  # most have nothing to start
        """Start what takes time and need not wait for the job's import."""
