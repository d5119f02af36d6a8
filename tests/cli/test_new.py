"""A new project does what its README says; nothing is written for a name that cannot be."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.helpers import environment, verb

SHORT = {
    "run.dir=runs/first": "run.dir=runs/first train.epochs=2",
    "train.epochs=60": "train.epochs=3",
}


def test_a_new_project_runs_as_its_readme_says(tmp_path):
    made = verb("new", tmp_path / "my_project")
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "my_project"
    block = (folder / "README.md").read_text().split("```")[1]
    flags, plan, launch, resume, sweep, slurm, tests = block.strip().splitlines()
    assert "-m accumulation.steps" in sweep
    assert "+cluster=site" in slurm
    environ = environment()
    environ["PATH"] = f"{shlex.quote(sys.exec_prefix)}/bin:{environ['PATH']}"
    lines = [flags, plan, launch, resume, f"{tests} -q -p no:cacheprovider"]
    for long, short in SHORT.items():
        lines = [line.replace(long, short) for line in lines]
    script = "\n".join(["set -e", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    result = json.loads((folder / "runs" / "first" / "result.json").read_text())
    assert (result["state"], result["updates"]) == ("finished", 30)
    assert set(result["metrics"]) >= {"accuracy"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("there", "exists already; name a new folder"),
        ("my-project", "cannot be the name of a Python package; try my_project"),
        ("class", "cannot be the name of a Python package; try my_class"),
        ("json", "json is an installed package already; try my_json"),
    ],
)
def test_nothing_is_written_for_a_name_that_cannot_be(tmp_path, name, message):
    (tmp_path / "there").mkdir()
    done = verb("new", tmp_path / name, COLUMNS="400")
    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())
