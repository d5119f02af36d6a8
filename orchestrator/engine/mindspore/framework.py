"""MindSpore, as a rank asks for it by name. Its import starts threads, so it is left to methods."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.engine.api import Engine, EngineSettings, Framework, GroupSpec
from orchestrator.engine.mindspore.rendezvous import ahead
from orchestrator.errors import JobError
from orchestrator.rundir.checkpoints import WEIGHTS

TESTED = "2.10"


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

    def state_dict(self, checkpoint: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors of MindSpore."""
        del extra
        check_installed()
        from orchestrator.engine.mindspore.engine import saved_tensors

        return saved_tensors(checkpoint / WEIGHTS)

    def load_weights(self, model: Any, checkpoint: Path, extra: Mapping[str, Any]) -> None:
        del extra
        from orchestrator.engine.mindspore.engine import load_cast

        load_cast(checkpoint / WEIGHTS, model.parameters_dict())

    def ahead(self, spec: GroupSpec) -> None:
        check_installed()
        ahead(spec)


def check_installed() -> None:
    """Raise `JobError` when this machine's MindSpore cannot run a job. Nothing is imported."""
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        raise JobError(
            f"this job is written for MindSpore, which is not installed; under Python 3.11 or "
            f"3.12: pip install 'mindspore=={TESTED}.*' 'numpy<2'"
        ) from None
    if not version.startswith(f"{TESTED}."):
        raise JobError(
            f"MindSpore {version} is installed, but {TESTED} was tested here; "
            f"pip install 'mindspore=={TESTED}.*'"
        )
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".", maxsplit=1)[0]) >= 2:
        raise JobError(
            f"MindSpore fails with NumPy {numpy} at its first operator; pip install 'numpy<2'"
        )
