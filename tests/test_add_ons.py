"""Without an add-on's folder everything else works, and says what is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import LIGHT, ROOT, TINY, call, verb

pytestmark = pytest.mark.whole_runs

ADD_ONS = {
    # name: its command, if it has one; a setting that needs it; the key that the refusal names
    # A framework's folder is in engine/; jobs name it.
    "engine/mindspore": (
        None,
        ["job._target_=orchestrator.jobs.digits_mindspore.DigitsMindSpore"],
        "framework=mindspore",
    ),
    "replay": ("replay", ["run.callbacks=[replay]"], "run.callbacks=replay"),
    "sentinel": (
        None,
        ["accumulation.sentinel_every=2", "accumulation.reduction=reproducible"],
        "accumulation.sentinel_every=2: run.callbacks=sentinel",
    ),
}
SHAPE = (
    "cluster.nodes=1",
    "cluster.ranks_per_node=2",
    "tracker=none",
    "train.updates=2",
    "accumulation.global_batch=8",
    "accumulation.micro_batch=2",
    "accumulation.steps=null",
)


@pytest.fixture(scope="module", params=[n for n in ADD_ONS if (ROOT / "orchestrator" / n).exists()])
def without(request, tmp_path_factory):
    """Return an add-on, and the environment of a copy of the source that lacks it."""
    name = request.param
    copy = tmp_path_factory.mktemp("without")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "orchestrator", "conf", "jobs", "hydra_plugins"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for path in filter(None, listed.split("\0")):
        if not path.startswith(f"orchestrator/{name}/") and (ROOT / path).exists():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, copy / path, follow_symlinks=False)
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns(Path(name).name))
    toy = ROOT / "tests" / "third_party" / "framework"
    return name, {"cwd": copy, "PYTHONPATH": f"{copy}:{toy}"}


def test_no_module_of_core_imports_it(without):
    name, where = without
    module = name.replace("/", ".")
    done = subprocess.run(
        ["grep", "-rlE", rf"^\s*(from|import) orchestrator\.{module}", "orchestrator"],
        cwd=where["cwd"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""


def test_its_command_is_not_listed_and_others_work(without, tmp_path):
    name, where = without
    command, settings, key = ADD_ONS[name]
    listed = verb("--help", code=0, **where).stdout
    assert "resume" in listed
    if command is not None:
        assert command not in listed
        refused = verb(command, "a", code=2, **where).stderr
        missing = f"is not part of this installation: orchestrator/{name}/ is missing\n"
        assert refused.endswith(missing)
    run = tmp_path / "run"
    call("--cfg", "job", code=0, **where)
    verb("plan", LIGHT, *SHAPE, code=0, **where)
    call(LIGHT, *SHAPE, f"run.dir={run}", code=0, **where)
    verb("resume", run, "train.updates=3", code=0, **where)
    refused = call(TINY, *SHAPE, *settings, code=2, **where)
    text = " ".join((refused.stdout + refused.stderr).split())
    assert "starting" not in text
    assert f"{key} is not part of this installation: orchestrator/{name}/" in text
