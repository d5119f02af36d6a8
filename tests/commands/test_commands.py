"""The commands: their options, output and exit codes."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from orchestrator import errors
from orchestrator.__main__ import EXIT_CODES, add_commands, app
from orchestrator.config import command_line
from orchestrator.plugins import COMMANDS
from orchestrator.report.status_tables import with_trials
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from tests.helpers import LIMIT_S, ROOT, environment
from tests.run_folders import make_run

ADD_ONS = sorted(COMMANDS.ours.keys() & {*COMMANDS.names()})
for add_on in ADD_ONS:
    add_commands([add_on])
VERBS = typer.main.get_command(app).commands
ACTS = {
    "new": "it writes a folder",
    "launch": "its last lines are the run's",
    "run": "the same",
    "resume": "the same",
    "attach": "the same",
    "logs": "a program's own lines",
    "cancel": "a sentence",
    "report": "it has --format json",
    "export": "it writes a file",
}
TRIAL = {
    "number": 0,
    "state": "complete",
    "value": 0.5,
    "point": ["job.x='a=b'"],
    "folder": "0",
    "why": None,
}
FOUND = {
    "search": "tpe",
    "objective": "loss",
    "maximize": False,
    "wanted": 2,
    "best": 0,
    "trials": [TRIAL, TRIAL | {"number": 1, "state": "failed", "value": None, "folder": None}],
    "line": {"overrides": [], "config_dir": None, "config_name": "config", "folder": "/"},
}
CODES = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_that_lists_has_json_and_every_verb_an_example(name):
    options = {option for parameter in VERBS[name].params for option in parameter.opts}
    assert {"-v", "--verbose"} <= options or name in ("launch", "run"), "Hydra's options"
    assert "--json" in options or name in ACTS
    assert VERBS[name].epilog.startswith(f"As in: python -m orchestrator {name}")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return CliRunner()


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("plan cluster.nodes=1 train.py --lr=3", "plan cluster.nodes=1 -- train.py --lr=3"),
        ("plan --confg-dir=x", "plan has no option '--confg-dir'; did you mean '--config-dir'?"),
        ("plan --step 3", "plan has no option '--step'; python -m orchestrator plan --help"),
    ],
)
def test_options_of_a_program_need_its_dashes(here, line, answer):
    found = here.invoke(app, line.split())
    assert found.exit_code == 2
    assert answer in " ".join(found.stderr.split())


def test_help_for_programs_needs_no_program(here):
    done = here.invoke(app, ["run", "--help"])
    assert (done.exit_code, "-- PROGRAM" in done.output) == (0, True), done.output


def test_a_search_is_read_back(tmp_path):
    folder = RunDir(tmp_path)
    assert folder.read_search() is None
    write_json(folder.search, FOUND)
    found = folder.read_search()
    assert found == FOUND
    [run, failed] = with_trials([{"folder": "/sweep/0"}], found)
    assert run["trials"][0]["parameters"] == {"job.x": "'a=b'"}
    assert failed["state"] == "failed"


def test_a_search_whose_trials_could_not_begin_yet_has_a_status(here, tmp_path):
    write_json(RunDir(tmp_path).search, FOUND)
    done = here.invoke(app, ["status", "."])
    assert (done.exit_code, "1 complete, 1 failed" in done.output) == (0, True), done.output
    [failed] = json.loads(here.invoke(app, ["status", ".", "--json"]).output)
    assert failed["trials"][0]["state"] == "failed"


def test_a_damaged_table_of_a_search_hides_none_of_its_runs(here, made):
    run = made("found/0").path
    RunDir(run.parent).search.write_text("{")
    done = here.invoke(app, ["status", "found"])
    assert done.exit_code == 0, done.output
    assert "search.json is damaged" in done.stderr
    assert "found/0" in done.stdout


def test_a_search_whose_method_is_not_known_is_not_resumed(here, made):
    run = made("found/0").path
    write_json(RunDir(run.parent).search, {"trials": []})
    done = here.invoke(app, ["resume", "found"])
    assert done.exit_code == 2
    assert "search.json does not say which search it is of" in done.stderr


@pytest.mark.parametrize("words", [["status"], ["plan"], ["status", "nowhere"], ["doctor"]])
def test_what_is_no_terminal_gets_no_colours(here, made, words):
    made("runs/one")
    done = here.invoke(app, words)
    assert done.output
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["status"], 0),
        (["compare", "runs/one", "runs/one"], 2),
        (["status", "x"], 2),
        (["plan", "accumulation.steps=0"], 2),
        (["logs"], 2),
        (["nonsense"], 2),
        (["plan", f"--config-dir={'x' * 300}"], 2),
    ],
)
def test_exit_codes_are_as_documented(here, made, words, code):
    made("runs/one")
    assert here.invoke(app, words).exit_code == code


def test_verb_after_launch_is_known():
    assert {*command_line.VERBS} == {*VERBS} - {*ADD_ONS}


def test_the_version_is_that_of_the_project(here):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert here.invoke(app, ["--version"]).output == f"{project['version']}\n"


def test_every_exit_code_is_in_the_help_and_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    [documented] = re.findall(r"Exit codes: (.*?\.)", readme, re.DOTALL)
    for text in (EXIT_CODES, documented):
        assert {int(code) for code in re.findall(r"\b\d+\b", text)} == CODES


@pytest.mark.parametrize("safe", [False, True])
def test_the_installed_command_finds_a_job_where_one_stands_as_python_does(safe, tmp_path):
    """Unless Python was asked to look for nothing there: then both are told so."""
    (tmp_path / "own.py").write_text((ROOT / "jobs/digits.py").read_text())
    script = str(Path(sys.executable).with_name("orchestrator"))
    said = [
        subprocess.run(
            [*command, "plan", "job._target_=own.Digits", "train.updates=3"],
            cwd=tmp_path,
            env=environment(**{"PYTHONSAFEPATH": "1"} if safe else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        for command in ([script], [sys.executable, "-m", "orchestrator"])
    ]
    assert {done.returncode for done in said} == {2 if safe else 0}, said
    assert len({done.stdout for done in said}) == 1
    assert all(("no module 'own'" in done.stderr) is safe for done in said)


@pytest.fixture
def script(tmp_path):
    """The console script as pip makes it of pyproject.toml."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = entry["orchestrator"].split(":")
    path = tmp_path / "orchestrator"
    path.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    path.chmod(0o755)
    return path


def in_bash(line, cwd=None):
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("command", ["launch --help", "plan"])
def test_closed_pipe_ends_a_command_silently(script, command):
    done = in_bash(f"{script} {command} | head -c 1")
    assert (len(done.stdout), done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["launch --cfg job", "plan", "status", "plan train.seed=x"])
def test_closed_streams_change_no_exit_code(script, tmp_path, command):
    codes = {
        in_bash(f"{script} {command} {closed}", cwd=tmp_path).returncode
        for closed in ("", "<&- >&-", ">&- 2>&-")
    }
    assert codes == {2 if "=x" in command else 0}


def test_a_path_that_a_shell_left_in_quotes_begins_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = make_run(tmp_path / "run")
    listed = CliRunner().invoke(app, ["status", "--json", "~/run"])
    assert [row["folder"] for row in json.loads(listed.stdout)] == [str(run.path)]
    refused = CliRunner().invoke(app, ["status", "~nobody-here/run"])
    assert (refused.exit_code, "there is no user nobody-here" in refused.output) == (2, True)


@pytest.mark.parametrize("more", ["schedule.warmup_updates=2", ""], ids=["warned", "plain"])
def test_a_reader_that_goes_away_before_the_start_leaves_no_folder(script, tmp_path, more):
    line = f"{script} launch run.dir={tmp_path}/run train.updates=1 {more}"
    done = in_bash(f"{line} | true")
    assert not (tmp_path / "run").exists(), done.stderr


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("module", ["typer", "hydra"])
def test_interrupt_during_imports_prints_no_traceback(tmp_path, module, script):
    # The command imports typer at once, and Hydra in the verb.
    interrupting = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / f"{module}.py").write_text(interrupting)
    start = [sys.executable, "-m", "orchestrator"]
    if script:
        start = [sys.executable, str(tmp_path / "orchestrator")]
        (tmp_path / "orchestrator").write_text("from orchestrator.__main__ import main\nmain()\n")
    done = subprocess.run(
        [*start, "plan", "job=digits"],
        env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=LIMIT_S,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (errors.EXIT_INTERRUPTED, False)
