"""What is known of frameworks, and of trackers' packages, where none is imported: installed here?
what happens on nodes?
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, JobError

MINDSPORE = "2.10"
"""The version that was tested."""
EXTRAS = {"tensorboard": "torch", "mlflow": "mlflow", "wandb": "wandb"}  # of trackers


def notes(config: Config, framework: str | None) -> list[str]:
    """Return sentences for `plan` about what happens on the nodes."""
    cluster, transport = config.cluster, config.transport
    found: list[str] = []
    if framework == "mindspore":
        found.append(
            "ranks meet in the run folder, then in MindSpore's dynamic cluster, whose scheduler is "
            "a child of rank 0: no msrun and no rank table; a dead rank is noticed within seconds "
            "by our own connections"
        )
    if transport == "hccl":
        last = cluster.ranks_per_node - 1
        found.append(
            f"each rank takes the Ascend NPU of its local rank (0 to {last}) before it makes any "
            f"tensor; a node without CANN refuses"
            + (", as does one without torch_npu" if framework == "torch" else "")
        )
        found.append(
            f"HCCL waits {cluster.rendezvous_timeout_s:g} s for connections and "
            f"{cluster.collective_timeout_s:g} s for a collective"
        )
    return found


def check_tracker(kind: str) -> None:
    """Raise `ConfigError` when this machine lacks what writes for a tracker of ours."""
    if kind in EXTRAS and importlib.util.find_spec(kind) is None:
        raise ConfigError(
            f"tracker.kind={kind} writes with a package that is not installed; "
            f"pip install 'cluster-orchestrator[{EXTRAS[kind]}]', or tracker=none"
        )


def check_installed(framework: str | None) -> None:
    """Raise `JobError` when this machine's MindSpore cannot run a job. Nothing is imported."""
    if framework != "mindspore":
        return
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install 'cluster-orchestrator[mindspore]'"
        if sys.version_info >= (3, 13):
            remedy += f" under Python 3.11 or 3.12: there is none for {platform.python_version()}"
        sentence = f"this job is written for MindSpore, which is not installed; {remedy}"
        raise JobError(sentence) from None
    if not version.startswith(f"{MINDSPORE}."):
        raise JobError(
            f"MindSpore {version} is installed, but {MINDSPORE} was tested here; "
            f"pip install 'cluster-orchestrator[mindspore]'"
        )
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".", maxsplit=1)[0]) >= 2:
        raise JobError(
            f"MindSpore fails with NumPy {numpy} at its first operator; pip install 'numpy<2'"
        )
