"""Environments of attempts: the description for environment.json, and the comparison of two."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir

PACKAGES = ("hydra-core", "omegaconf", "submitit", "numpy", "safetensors", "torch", "mindspore")

NOT_RECORDED = "versions, processor and threads: not recorded, so they may differ"
"""Of two runs of which one has no environment.json, as a program without `run.windows`."""


def differing(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what differs, by name, as "this against that"; nothing if one of them is unknown
    (`NOT_RECORDED`).

    >>> differing({"framework": {"torch": "2.13.0"}}, {"framework": {"torch": "2.12.0"}})
    {'torch': '2.13.0 against 2.12.0'}
    """
    if a is None or b is None:
        return {}
    left, right = _decisive(a), _decisive(b)
    return {
        name: f"{left.get(name, 'none')} against {right.get(name, 'none')}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def environment_notes(a: RunDir, b: RunDir) -> list[str]:
    """Return what decides bits and differs between two runs, or may: versions and so on."""
    environments = a.read_environment(), b.read_environment()
    if None in environments:
        return [NOT_RECORDED]
    unlike = differing(*environments)
    return [f"computed with another {name}: {values}" for name, values in unlike.items()]


def warnings_of(now: Mapping[str, Any], run: RunDir) -> list[str]:
    """Return a sentence if a run continues in another environment than it recorded before."""
    try:
        changes = differing(now, run.read_environment())
    except RunFolderError as error:
        return [f"{error}; so whether this start computes with the same is unknown"]
    if not changes:
        return []
    what = ", ".join(f"{name} {values}" for name, values in changes.items())
    sentence = (
        f"this attempt is computed with something else than the one before it: {what}. From here "
        "on the weights may differ in bits from those of an undisturbed run"
    )
    return [sentence]


def _decisive(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {"processor": environment.get("processor"), **environment.get("framework", {})}


def describe_environment(
    framework_versions: Mapping[str, str], transport: str, code: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe code, packages and machine, without environment variables, which may be secret."""
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
