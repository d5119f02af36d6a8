"""The toy packages, installed as pip would leave them where every new process finds them."""

import importlib
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

TOYS = ("cluster", "transport", "tracker")
collect_ignore = [*TOYS, "framework"]  # they are found once they are installed, never here


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    packages = [ROOT / "tests" / "third_party" / name for name in TOYS]
    how = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-warn-conflicts")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *how, "--target", folder, *packages],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    return folder


@pytest.fixture(autouse=True)
def installed(target, monkeypatch):
    """Here and in every process that a test starts."""
    monkeypatch.syspath_prepend(target)
    monkeypatch.setenv("PYTHONPATH", f"{target}{os.pathsep}{ROOT}")
    importlib.invalidate_caches()
