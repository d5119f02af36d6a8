"""torch, as a rank asks for it by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Any optimizer imports torch's compiler when it is built: 1.2 s of CPU time and 70 MiB. Imported
# here, the process that ranks are forked from does it once, and its forks share the memory. Loader
# workers and programs without an optimizer never need it.
import torch._dynamo  # noqa: F401  # pyright: ignore[reportUnusedImport]

from orchestrator.engine.api import Engine, EngineSettings, Framework, GroupSpec
from orchestrator.engine.torch.consistency_checks import versions
from orchestrator.engine.torch.engine import TorchEngine
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.engine.torch.rendezvous import form_group
from orchestrator.engine.torch.state import export_state, load_model, saved_model


class Torch(Framework):
    """The framework `torch`."""

    def form_group(self, spec: GroupSpec) -> BaseGroup:
        return form_group(spec)

    def build_engine(self, job: Any, settings: EngineSettings, group: BaseGroup) -> Engine:
        return TorchEngine(job, settings, group)

    def versions(self) -> dict[str, str]:
        return versions()

    def export(self, checkpoint: Path, extra: Mapping[str, Any], form: str, to: Path) -> None:
        export_state(checkpoint, extra, form, to)

    def state_dict(self, checkpoint: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
        return saved_model(checkpoint, extra["model"])

    def load_weights(self, model: Any, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        load_model(model, checkpoint, extra["model"])
