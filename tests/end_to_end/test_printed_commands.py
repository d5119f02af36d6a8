"""Commands that the pages print are executed as they stand, in the folder of a reader who has runs.

All of them, of shell blocks, sentences and the help's examples, but those of which `ELSEWHERE` says
why: those that need a site (`+cluster=slurm`), its nodes or its commands, the network or another
installation, and hours. Their words are held against the parsers, the schema and the planner. So a
command that is new on a page is executed, or needs a line in that table. Commands that train are
cut to two updates by `SHORT`.
"""

import contextlib
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer

import benchmarks.__main__ as measurements
import slurm.__main__ as development
from orchestrator.__main__ import add_commands, app
from orchestrator.commands.new import FILES
from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer
from orchestrator.plugins import COMMANDS
from orchestrator.runs.start import prepare
from orchestrator.sweep.points import check_points
from tests.docs.printed import PROGRAMS, ROOT, SLURMS, inline, python_blocks, shell_commands
from tests.helpers import LIMIT_S, begin, call, records, until
from tests.hold import Hold

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

SHORT = ("train.epochs=null", "train.samples=null", "train.updates=2", "train.evaluate_every=0")
add_commands([])
VERBS = typer.main.get_command(app).commands
ELSEWHERE = {
    r"…|\||KEY=VALUE|key=value|RUN\|SWEEP|FOLDER$| N ": "words that stand for others",
    r"^(srun|sbatch|squeue|scontrol|sacct)\b": "SLURM's own commands: tests/slurm",
    r"^python -m slurm\b": "a cluster is brought up and down: tests/slurm/test_dev_cluster.py",
    r"cluster=(slurm|mysite)": "a site of the reader's: tests/slurm submits and plans the like",
    r"my_project|config-name main|runs/first": "tests/commands/test_new.py executes the tutorial",
    r"runs/trunk@40": "tests/docs/test_examples.py executes it",
    r"^make\b": "installs, measures, or tests everything",
    r"^pip\b": "installs from a registry",
    r"benchmarks\b": "minutes to an hour: tests/benchmarks",
    r"torch\.distributed\.run": "tests/docs/test_library.py runs these scripts",
    r"windows\.py": "the same",
    r"reduction=reproducible": "tests/docs/test_examples.py executes them",
    r"mindspore|job=line": "tests/docs/test_examples.py, tests/engine/mindspore",
    r"runs/(start|torch)\b": "the same: it is what these are compared with",
    r"orchestrator export": "runs of torch: tests/end_to_end/test_restarts.py",
    r"sweep\.search": "twelve runs: tests/search/test_whole.py",
    r"experiment=time_and_memory": "half a minute: tests/sweep/test_whole.py plans it",
    r"accumulation\.steps=1,2": "some runs of torch: tests/sweep/test_whole.py plans the like",
    r"ranks_per_node=8": "eight ranks of the job that others execute",
    r"--lr 0\.1|--epochs 3": "programs of the same shape are executed",
    r"http:|tracker=": "a server, or an extra: tests/trackers/test_trackers.py",
    r"completion": "writes into a shell's own files",
}
OF_ADD_ONS = {
    "audit": "scripts that train: tests/audit",
    "bisect": "runs of torch: tests/replay",
    "rehearse": "minutes: tests/rehearse",
    "replay": "runs of torch: tests/replay",
}
ELSEWHERE |= {rf"orchestrator {verb}": why for verb, why in OF_ADD_ONS.items() if verb in VERBS}
MISSING = COMMANDS.ours.keys() - {*COMMANDS.names()}
CACHE = str(Path.home() / ".cache")  # with the digits, which all ranks would make
SPEAKS = """
from tests.light_job import Light
class Speaks(Light):
    def model(self):
        print("it begins")
        return super().model()
"""
PROGRAM = "from orchestrator import current_run as run\nrun.report(0, loss=1.0)\n"


def printed(folder):
    """Each command once, as the words of a shell, with its page."""
    found = {}
    for page, words in shell_commands(folder):
        found.setdefault(installed(words), page)
    for one in inline():
        words = one.text.split()
        if words[0] in PROGRAMS and len(words) > 1:
            found.setdefault(installed(shlex.split(one.text)), one.page)
        elif words[0] in VERBS and "RUN" in words:
            found.setdefault(("orchestrator", *words), one.page)
    for verb in (info for info in app.registered_commands if info.epilog):  # of ours, all have one
        found.setdefault(installed(shlex.split(verb.epilog)[2:]), "the help")
    return {words: page for words, page in found.items() if MISSING.isdisjoint(words[1:2])}


def installed(words):
    """As the installed command is typed, where it is one of its verbs."""
    same = tuple(words[:3]) == ("python", "-m", "orchestrator")
    return ("orchestrator", *words[3:]) if same else tuple(words)


def elsewhere(words):
    """The row that says why a command is not executed here, if one does."""
    line = " ".join(words)
    return next((pattern for pattern in ELSEWHERE if re.search(pattern, line)), None)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder in which a run and a sweep go on, two runs have ended, and programs lie."""
    folder = tmp_path_factory.mktemp("reader")
    slowly = Hold(folder / "hold").hold_before(10**9)
    (folder / "train.sh").write_text("#!/bin/sh\n")
    (folder / "train.sh").chmod(0o700)
    mine = next(p.text for p in python_blocks() if "class Line(Job)" in p.text)
    for path, text in {
        "my_jobs/__init__.py": "",
        "my_jobs/line.py": mine,
        "conf/job/line.yaml": "_target_: my_jobs.line.Line\n",
        "conf/mine.yaml": "defaults: [base, _self_]\n",
        **{
            name.replace("NAME", "my_project"): text.replace("NAME", "my_project")
            for name, text in FILES.items()
        },
        "FOLDER/cluster/mysite.yaml": (ROOT / "conf" / "cluster" / "slurm.yaml").read_text(),
        **dict.fromkeys(("train.py", "train_mindspore.py", "package/train.py"), PROGRAM),
        "windows.py": "",
        "speaks.py": SPEAKS,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    line = (
        "job._target_=speaks.Speaks",
        "tracker=none",
        "train.epochs=null",
        "accumulation.global_batch=32",
        "accumulation.steps=2",
    )
    held = (*line, "job.pause_s=3", slowly.override)
    call(*line, "train.updates=4", "run.dir=A", cwd=folder, code=0)
    trunk = ("job=digits", "tracker=none", "train.updates=40", "train.evaluate_every=0")
    call(
        *trunk,
        "cluster.nodes=1",
        "cluster.ranks_per_node=1",
        "run.dir=runs/trunk",
        cwd=folder,
        code=0,
    )
    for name in ("B", "RUN_A", "RUN_B", "runs/one", "runs/first"):
        shutil.copytree(folder / "A", folder / name)
    going = [
        begin(*held, "run.dir=RUN", "train.updates=150", cwd=folder),
        begin(
            "-m",
            *held,
            "run.dir=SWEEP",
            "cluster.nodes=1",
            "cluster.ranks_per_node=1",
            "train.updates=1,150",
            "schedule.base_lr=0.1,0.01",
            "sweep.parallel=4",
            cwd=folder,
        ),
    ]
    with contextlib.ExitStack() as going_on:
        going_on.callback(let_go, slowly, going)
        until(lambda: all(records(folder / n) for n in ("RUN", "SWEEP/0", "SWEEP/3")), 90)
        yield folder, going_on.close


def let_go(slowly, going):
    slowly.release()
    for one in going:
        one.communicate(timeout=LIMIT_S)


def split(words):
    """(module, arguments) of a command."""
    program, *rest = words
    if program == "python":
        return rest[1], rest[2:]
    assert program == "orchestrator", words
    return program, rest


def turn(words):
    """Sort key: read-only commands, then `cancel` (ranks before runs), `resume`, and its logs."""
    module, rest = split(words)
    verb = rest[0] if module == "orchestrator" and rest else ""
    order = {"cancel": 1, "resume": 2, "logs": 3, "attach": 3, "wait": 3}
    return order.get(verb, 0), -len(rest[-1]) if verb == "cancel" else len(rest)


def execute(words, folder):
    """Raises unless the command does what it is for."""
    module, rest = split(words)
    trains = module == "orchestrator.launch" or rest[:1] in (["launch"], ["run"])
    if trains and "--" not in rest and not any(word.startswith("--") for word in rest):
        rest = [*rest, *SHORT]
    homes = {"HOME": str(folder), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", CACHE)}
    done = call(*rest, module=module, cwd=folder, timeout=LIMIT_S, **homes)
    finds = rest[:1] == ["doctor"]  # 1: this machine lacks something
    assert done.returncode in ((0, 1) if finds else (0,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip(), "it says nothing"


def composed(words):
    """Raises if a launch with these words would be refused before it starts."""
    composer = Composer(read_command_line(words))
    found = composer.compose()
    if composer.search != "none":
        from orchestrator.search.search import Search  # of an add-on, whose pages print this

        assert Search(composer).trials
    elif found.sweeps:
        assert check_points(composer)
    else:
        prepare(found.config(), new=False)  # its initial weights come from another command


def check(words):
    """Raises unless the parsers, the schema and the planner take a command that is not executed."""
    if words[:4] == ("python", "-m", "slurm", "up") and "|" in words:
        assert set(words[3::2]) == set(typer.main.get_command(development.app).commands)
        return
    words = [word for word in words if not word.endswith("…") and word.lower() != "key=value"]
    program, *rest = words[2:] if words[:2] == ["python", "-m"] else words
    if program == "orchestrator":
        check_verb(rest)
    elif program == "orchestrator.launch":
        composed(rest)
    elif program == "slurm":
        verb = typer.main.get_command(development.app).commands[rest[0]]
        verb.make_context(verb.name, rest[1:])
    elif program == "benchmarks":
        known = {*measurements.MEASUREMENTS, *measurements.BY_NAME, "tables"}
        named = {word for word in rest if word.isidentifier() and word not in ("N", "NAME")}
        assert named <= known
        options = {word.strip("[]") for word in rest if word.lstrip("[").startswith("-")}
        assert options <= {"--seed", "--faults", "--quick"}
    elif program == "torch.distributed.run":
        scripts = [p.text.partition("\n")[0] for p in python_blocks()]
        assert f"# {rest[-1]}" in scripts
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{rest[0]}:.*##", makefile, re.MULTILINE)
        assert all(f"$({setting.partition('=')[0]})" in makefile for setting in rest[1:])
    elif program == "pip":  # from the project's folder: in a registry its name may be anybody's
        extras = re.fullmatch(r"\.(?:\[(.*)\])?", rest[-1])[1] or ""
        declared = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in declared for extra in extras.split(",") if extra)
    else:
        assert program in SLURMS


def check_verb(words):
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--install-completion", "--show-completion")
        return
    if words[0] == "audit" and "--" in words:  # typer gets the words before the script
        words = words[: words.index("--")]
    if words[0] == "launch" or "--" in words:  # a program follows it
        composed(words[1:])
        return
    with VERBS[words[0]].make_context(words[0], words[1:]) as context:
        overrides = context.params.get("overrides")
    if words[0] in ("plan", "resume") and overrides:
        composed([*["-m"] * ("-m" in words), *overrides])


def test_every_command_is_executed_or_its_words_are_checked(reader, tmp_path, monkeypatch):
    (folder, let_all_go), found = reader, printed(tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    here = sorted((words for words in found if elsewhere(words) is None), key=turn)
    others = [words for words in found if elsewhere(words)]
    assert min(len(here), len(others)) > 25
    assert {elsewhere(words) for words in others} == set(ELSEWHERE), "a row of no use"
    for words in (*others, *here):
        if words in here and turn(words)[0] == 2:
            let_all_go()
        try:
            execute(words, folder) if words in here else check(words)
        except (Exception, SystemExit) as error:
            error.add_note(f"printed in {found[words]}: {' '.join(words)}")
            raise
