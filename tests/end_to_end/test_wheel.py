"""Built as a wheel and installed elsewhere, it works the same, with a job of another package."""

import json
import subprocess
import sys

import pytest

from tests.helpers import LIMIT_S, ROOT, environment

pytestmark = pytest.mark.whole_runs


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder as `pip install --target` makes it of our wheel."""
    base = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", base, ROOT]
    subprocess.run(build, check=True, capture_output=True, text=True)
    wheel = next(base.glob("*.whl"))
    target = base / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", target, wheel], check=True, capture_output=True)
    return target


def run(installed, folder, *arguments, module="orchestrator.launch"):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment(PYTHONPATH=str(installed)),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_brings_its_configuration_and_plans(installed, tmp_path):
    assert (installed / "orchestrator" / "conf" / "config.yaml").is_file()
    assert not any((installed / name).exists() for name in ("jobs", "conf", "slurm"))
    plan = run(installed, tmp_path, "plan", "experiment=jepa_240", "--json", module="orchestrator")
    assert [json.loads(plan)[name] for name in ("ranks", "nodes", "micro_steps")] == [240, 30, 2]


def test_a_new_project_trains_and_resumes_where_the_user_has_folders_of_our_names(
    installed, tmp_path
):
    run(installed, tmp_path, "new", "mine", module="orchestrator")
    for name in ("jobs", "slurm"):
        (tmp_path / "mine" / name).mkdir()
        (tmp_path / "mine" / name / "__init__.py").write_text("raise SystemExit(3)\n")
    own = ("--config-dir", "conf", "--config-name", "main", "train.epochs=1", "run.dir=runs/first")
    run(installed, tmp_path / "mine", *own)
    more = ("resume", "runs/first", "train.epochs=2")
    run(installed, tmp_path / "mine", *more, module="orchestrator")
    result = json.loads((tmp_path / "mine" / "runs" / "first" / "result.json").read_text())
    assert (result["state"], result["updates"]) == ("finished", 20)
