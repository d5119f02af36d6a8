"""A layer for each package of orchestrator/; import-linter checks the rest."""

import re
import subprocess
import sys
import tomllib

import pytest

from tests.helpers import ROOT, run_python

pytestmark = pytest.mark.whole_runs


def test_each_folder_has_its_layer():
    """A new folder without a layer could import everything, and everything could import it."""
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [first] = [one for one in layers["contracts"] if one["name"] == "Imports point one way"]
    placed = {*re.findall(r"orchestrator\.(\w+)", " ".join(first["layers"]))}
    files = (ROOT / "orchestrator").glob("[!_]*.py"), (ROOT / "orchestrator").glob("*/__init__.py")
    folders = {p.parent for p in files[1] if not p.parent.is_symlink()}
    there = {p.stem for p in files[0]} | {folder.name for folder in folders}
    assert there <= placed


def test_a_plan_is_made_without_the_agent(tmp_path):
    """The agent and what it needs take a tenth of the time of `plan`."""
    words = ("job._target_=tests.tiny_job.Tiny", "accumulation.global_batch=16")
    command = ("-X", "importtime", "-m", "orchestrator", "plan", *words, f"run.dir={tmp_path}/run")
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, cwd=ROOT
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "orchestrator.clusters.local.environment" in modules
    assert not [name for name in modules if name.startswith("orchestrator.agent.")]


def test_help_lists_the_commands_of_add_ons_without_what_they_run():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrator", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "orchestrator.commands.interface" in modules
    assert modules.isdisjoint({"hydra", "numpy", "orchestrator.api"})


def test_ranks_need_neither_hydra_nor_the_tables_of_the_terminal():
    """Each node would import them before its ranks begin."""
    modules = "orchestrator.agent.local_nodes, orchestrator.trainer.main"
    code = f"import sys, {modules}, orchestrator.engine.torch.framework; print(*sys.modules)"
    imported = {*run_python(code).stdout.split()}
    assert "orchestrator.trainer.setup" in imported
    unwanted = ("hydra", "rich", "orchestrator.report.terminal", "orchestrator.config.composer")
    assert imported.isdisjoint(unwanted)
