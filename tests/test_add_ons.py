"""Without an add-on's folder everything else works, and says what is missing."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from orchestrator.plugins import PluginKind
from tests.add_ons import ADD_ONS, PRESENT
from tests.helpers import LIGHT, ROOT, TINY, call, git, verb

pytestmark = pytest.mark.whole_runs


SHAPE = (
    "cluster.nodes=1",
    "cluster.ranks_per_node=2",
    "tracker=none",
    "train.updates=2",
    "accumulation.global_batch=8",
    "accumulation.micro_batch=2",
    "accumulation.steps=null",
)


def base_name(name):
    return Path(name).name


def copy_without(names, folder):
    """Copy the source without these add-ons; return where and how commands of the copy run."""
    listed = git(ROOT, "ls-files", "-z", "orchestrator", "conf", "jobs")
    for path in filter(None, listed.split("\0")):
        of_add_on = any(
            path.startswith(f"orchestrator/{name}/") or path == f"orchestrator/{name}.py"
            for name in names
        )
        if not of_add_on and (ROOT / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    shutil.copytree(
        ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns(*map(base_name, names))
    )
    toy = ROOT / "tests" / "third_party" / "framework"
    return {"cwd": folder, "PYTHONPATH": f"{folder}:{toy}"}


def refuses(name, where):
    """Check that the verbs and the setting of a missing add-on are refused."""
    add_on, missing = ADD_ONS[name], f"is not part of this installation: orchestrator/{name}/"
    for command in add_on.commands:
        refused = verb(command, "a", code=2, **where).stderr
        assert refused.endswith(f"command={command} {missing} is missing\n")
    if add_on.settings:
        refused = call(TINY, *SHAPE, *add_on.settings, code=2, **where)
        text = " ".join((refused.stdout + refused.stderr).split())
        assert "starting" not in text
        assert f"{add_on.refused} {missing}" in text


def is_listed(command, text):
    return re.search(rf"^\W*{command}\s", text, re.MULTILINE) is not None


@pytest.mark.parametrize("name", PRESENT)
def test_one_is_missing(name, tmp_path):
    """Its verbs are not listed, those of the others are; what needs it is refused; a run runs."""
    where = copy_without([name], tmp_path / "copy")
    listed = verb("--help", code=0, **where).stdout
    for other in PRESENT:
        for command in ADD_ONS[other].commands:
            assert is_listed(command, listed) == (other != name)
    refuses(name, where)
    done = call(LIGHT, *SHAPE, f"run.dir={tmp_path}/run", code=0, **where)
    assert "submitit" not in done.stderr


def test_all_are_missing(tmp_path):
    where = copy_without(ADD_ONS, tmp_path / "copy")
    names = "|".join(ADD_ONS).replace("/", r"\.")
    imports = subprocess.run(
        ["grep", "-rE", rf"(from|import) orchestrator\.({names})\b", "orchestrator"],
        cwd=where["cwd"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert imports.stdout == ""
    run = tmp_path / "run"
    assert is_listed("resume", verb("--help", code=0, **where).stdout)
    call("--cfg", "job", code=0, **where)
    verb("plan", LIGHT, *SHAPE, code=0, **where)
    call(LIGHT, *SHAPE, f"run.dir={run}", code=0, **where)
    verb("resume", run, "train.updates=3", code=0, **where)
    refuses("report_page", where)


@pytest.mark.parametrize(
    ("where", "missing"),
    [
        ("orchestrator.gone:Gone", "orchestrator/gone.py"),
        ("orchestrator.gone.method:Gone", "orchestrator/gone/"),
        ("orchestrator.config.gone:Gone", "orchestrator/config/gone.py"),
    ],
)
def test_the_file_or_the_folder_that_is_missing_is_named(where, missing):
    kind = PluginKind(key="a.key", group="orchestrator.things", ours={"gone": where})
    assert kind.names() == []
    assert (
        kind.refusal("gone") == f"a.key=gone is not part of this installation: {missing} is missing"
    )


def test_each_has_its_place_in_the_top_layer():
    """So nothing imports it, neither core nor another add-on."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [contract] = [
        contract
        for contract in configuration["tool"]["importlinter"]["contracts"]
        if contract["name"] == "Imports point one way"
    ]
    top = {*re.findall(r"\(orchestrator\.(\w+)\)", contract["layers"][0])}
    assert top == {*ADD_ONS} - {"engine/mindspore"}, "an engine has a contract of its own"
