"""Checks whether the packages of frameworks and trackers are installed, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys

from orchestrator.errors import ConfigError, JobError

MINDSPORE = "2.10"  # the version that was tested
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow-skinny", "wandb": "wandb"}


def check_tracker(kind: str) -> None:
    """Raise `ConfigError` when this machine lacks the package of a built-in tracker."""
    if kind in PACKAGES and importlib.util.find_spec(kind) is None:
        raise ConfigError(
            f"tracker.kind={kind} writes with a package that is not installed; pip install "
            f"{PACKAGES[kind]}, or tracker=none"
        )


def check_installed(framework: str | None) -> None:
    """Raise `JobError` when this machine's MindSpore cannot run a job. Nothing is imported."""
    if framework != "mindspore":
        return
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        remedy = f"pip install 'mindspore=={MINDSPORE}.*' 'numpy<2'"
        if sys.version_info >= (3, 13):
            remedy += f" under Python 3.11 or 3.12: there is none for {platform.python_version()}"
        sentence = f"this job is written for MindSpore, which is not installed; {remedy}"
        raise JobError(sentence) from None
    if not version.startswith(f"{MINDSPORE}."):
        raise JobError(
            f"MindSpore {version} is installed, but {MINDSPORE} was tested here; "
            f"pip install 'mindspore=={MINDSPORE}.*'"
        )
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".", maxsplit=1)[0]) >= 2:
        raise JobError(
            f"MindSpore fails with NumPy {numpy} at its first operator; pip install 'numpy<2'"
        )
