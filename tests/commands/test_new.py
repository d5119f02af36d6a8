"""A new project does what the tutorial and its README say; a name that cannot be is refused."""

import json
import re

import pytest

from orchestrator import errors
from tests.docs.printed import typed
from tests.docs.scripts import page_text
from tests.helpers import await_exit, begin, call, run_python, until, verb

pytestmark = pytest.mark.long


def _short(script):
    """The same with one epoch, and a second after the resume."""
    script = script.replace("launch --config-dir", "launch train.epochs=1 --config-dir")
    return script.replace("train.epochs=60", "train.epochs=2")


def _run(script, folder):
    """Run the commands of a shell block; return what the last one prints."""
    for _, _, module, *arguments in typed(script, folder.parent):
        done = call(*arguments, module=module, cwd=folder, code=0)
    return done.stdout


def test_the_tutorial_leads_from_an_empty_folder_to_a_resumed_run(tmp_path):
    part = page_text("your-own-job.md").split("\n## ")[1]
    assert part.startswith("From an empty folder")
    reader = tmp_path / "reader"
    reader.mkdir()
    _run(re.search(r"^    (python -m .*)$", part, re.MULTILINE)[1], reader)
    folder = reader / "my_project"
    _run(_short("\n".join(re.findall(r"```bash\n(.*?)```", part, re.DOTALL))), folder)
    result = json.loads((folder / "runs" / "first" / "result.json").read_text())
    assert (result["state"], result["updates"]) == ("finished", 20)
    assert set(result["metrics"]) >= {"accuracy"}

    [check] = re.findall(r"python -m .*", (folder / "conf" / "cluster" / "site.yaml").read_text())
    done = call(*check.split()[3:], module="orchestrator", cwd=folder)
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    flags, *commands = (folder / "README.md").read_text().split("```")[1].strip().splitlines()
    tests = commands.pop()
    assert "2 passed" in _run(f"{tests} -q -p no:cacheprovider", folder)
    plans = [c.replace(".launch", " plan") for c in commands if "=site" in c or " -m acc" in c]
    assert len(plans) == 2
    shown = _run("\n".join([flags, *plans]), folder)
    assert "#SBATCH --time=30" in shown


def test_what_the_page_for_coding_agents_says_is_so(tmp_path):
    folder = tmp_path / "agents_project"
    verb("new", folder, code=0)
    page = (folder / "AGENTS.md").read_text()
    [block] = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    printed = {}
    for _, _, module, *arguments in typed(block, tmp_path):
        done = call(*arguments, module=module, cwd=folder, code=0)
        printed[arguments[0]] = done.stdout
    for command in ("wait", "status"):
        [run] = json.loads(printed[command])
        assert (run["state"], run["updates"], run["culprit"]) == ("finished", 20, None)
    assert "update 20/20" in printed["logs"]
    assert json.loads((folder / "runs" / "a" / "result.json").read_text())["updates"] == 30

    [script] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ended = run_python(script, cwd=folder)
    assert ended.stdout.split()[0] == "finished"
    assert len(ended.stdout.split()) == 4

    codes = {"FINISHED", "FAILED", "USAGE", "STOPPED", "TIMED_OUT", "INTERRUPTED"}
    said = page.partition("**Exit codes**: ")[2].partition("- **")[0]
    numbers = {int(number) for number in re.findall(r"(?:^|;\s)(\d+) ", said)}
    assert numbers == {getattr(errors, f"EXIT_{code}") for code in codes}
    ours = ["--config-dir", "conf", "--config-name", "main"]
    call(*ours, "train.updatse=1", cwd=folder, code=errors.EXIT_USAGE)
    process = begin(*ours, "train.updates=100000", "run.dir=runs/c", cwd=folder)
    until((folder / "runs" / "c" / "metrics.jsonl").exists, what="its first update")
    verb("wait", "runs/c", "--timeout", "0.1", cwd=folder, code=errors.EXIT_TIMED_OUT)
    verb("cancel", "runs/c", cwd=folder, code=0)
    await_exit(process, errors.EXIT_STOPPED)
    assert list((folder / "runs" / "c" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("there", "exists already; name a new folder"),
        ("my-project", "cannot be the name of a Python package; try my_project"),
        ("class", "cannot be the name of a Python package; try my_class"),
        ("conf", "conf is the name of another folder of the project; try my_conf"),
        ("json", "json is an installed package already; try my_json"),
    ],
)
def test_nothing_is_written_for_a_name_that_cannot_be(tmp_path, name, message):
    (tmp_path / "there").mkdir()
    done = verb("new", tmp_path / name, COLUMNS="400", code=2)
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert not list((tmp_path / "there").iterdir())
