"""What ran: versions, machine and the state of the code, for environment.json."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

PACKAGES = ("hydra-core", "omegaconf", "submitit", "numpy", "safetensors", "torch", "mindspore")


def describe_environment(
    framework_versions: Mapping[str, str], transport: str, code: Mapping[str, Any]
) -> dict[str, Any]:
    """What was run and on what. Secrets are not copied: no environment variables.

    Args:
        code: the `code_state` of what runs.
    """
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "framework": dict(framework_versions),
        "transport": transport,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "git": dict(code),
    }
