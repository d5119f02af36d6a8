"""What ran: versions, machine and the state of the code, for environment.json."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PACKAGES = ("hydra-core", "omegaconf", "submitit", "numpy", "safetensors", "torch", "mindspore")
DIFF_LIMIT_BYTES = 1 << 20


def _git(*arguments: str) -> str | None:
    """Output of a git command in the working folder; None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def describe_environment(framework_versions: Mapping[str, str], transport: str) -> dict[str, Any]:
    """What was run and on what. Secrets are not copied: no environment variables."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    commit = _git("rev-parse", "HEAD")
    diff = _git("diff", "HEAD") or ""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "framework": dict(framework_versions),
        "transport": transport,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "git": {
            "commit": commit.strip() if commit else None,
            "diff": diff[:DIFF_LIMIT_BYTES],
            "diff_cut": len(diff) > DIFF_LIMIT_BYTES,
        },
    }
