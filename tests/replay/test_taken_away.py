"""Without the add-on's folder everything else works, and says what is missing."""

import shutil
import subprocess

import pytest

from tests.helpers import LIGHT, ROOT, call, verb


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Return the environment of a copy of the source that lacks the add-on."""
    copy = tmp_path_factory.mktemp("without")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "orchestrator", "conf", "jobs", "hydra_plugins"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if not name.startswith("orchestrator/replay/") and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("replay"))
    toy = ROOT / "tests" / "third_party" / "framework"
    return {"cwd": copy, "PYTHONPATH": f"{copy}:{toy}"}


def test_no_module_of_core_imports_it(without):
    done = subprocess.run(
        ["grep", "-rlE", r"^\s*(from|import) orchestrator\.replay", "orchestrator"],
        cwd=without["cwd"], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == ""


def test_its_command_is_not_listed_and_others_work(without, tmp_path):
    listed = verb("--help", code=0, **without).stdout
    assert "replay" not in listed
    assert "resume" in listed
    refused = verb("replay", "a", code=2, **without).stderr
    assert refused.endswith("is not part of this installation: orchestrator/replay/ is missing\n")
    run = tmp_path / "run"
    shape = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none", "train.updates=2",
             "accumulation.global_batch=8", "accumulation.steps=2")  # fmt: skip
    call("--cfg", "job", code=0, **without)
    verb("plan", LIGHT, *shape, code=0, **without)
    call(LIGHT, *shape, f"run.dir={run}", code=0, **without)
    verb("resume", run, "train.updates=3", code=0, **without)
    missing = call(LIGHT, *shape, "run.callbacks=[replay]", **without)
    assert missing.returncode == 2
    said = " ".join((missing.stdout + missing.stderr).split())
    assert "run.callbacks=replay is not part of this installation: orchestrator/replay/" in said
