"""A search in this process: of a plain program, whose trials a test may let end at once."""

from rich.console import Console

from orchestrator.config.command_line import CommandLine, program_overrides
from orchestrator.config.composer import Composer
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.runs.follow import OutputOptions
from orchestrator.search.search import Search, Searcher
from orchestrator.sweep.local import PointResult
from orchestrator.sweep.tasks import locked_sweep, prepared_task

QUIET = OutputOptions(console=Console(quiet=True), quiet=True)
PROGRAM = """\
import sys, time
from orchestrator import current_run as run
given = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
lr, k = float(given["lr"]), int(given["k"])
if k in (2, 5):
    sys.exit(f"{k} cannot be")
for update in range(int(given.get("updates", 4))):
    run.report(update, loss=(lr - 0.3) ** 2 + k / 10 + 1 / (update + 1))
    if run.should_stop(update):
        break
    if lr >= float(given.get("slow_from", 0)):
        time.sleep(float(given.get("pause", 0)))
"""
SPACE = ("job.arguments.lr=interval(0,1)", "job.arguments.k=range(1,7)")
ONE = ("cluster.nodes=1", "cluster.ranks_per_node=1", "tracker=none")


def loss_of(lr, k, updates=4):
    """Return the loss that the program reports last, None if it fails."""
    return None if k in (2, 5) else (lr - 0.3) ** 2 + k / 10 + 1 / updates


def line_of(folder, *more):
    """The overrides of a search of `PROGRAM`, which is written into the folder above it."""
    script = folder.parent / "program.py"
    script.write_text(PROGRAM)
    return (
        *SPACE,
        *ONE,
        "sweep.search=tpe",
        f"run.dir={folder}",
        *more,
        *program_overrides([str(script)]),
    )


def search_of(*overrides):
    """Return the search of these overrides."""
    composer = Composer(CommandLine(overrides=overrides, multirun=True))
    composer.compose()
    return Search(composer)


class AtOnce:
    """Runs of trials that end as soon as they begin, each with its own value.

    Args:
        most: trials are held until so many run, so that all of them run at the same time.
    """

    def __init__(self, most=1):
        self.running, self.most = [], most
        self.began, self.stopped = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def has_room(self, task):
        return len(self.running) < self.most

    def start(self, task):
        self.began.append(task.run.path)
        with prepared_task(task, QUIET) as ready:
            run = ready.run
            run.begin_attempt()
        self.running.append(task)
        return True

    def follow(self, task):
        raise AssertionError(f"no process holds {task.run.path}")

    def stop(self, task):
        self.stopped.append(task.run.path)

    def wait(self):
        task = self.running.pop(0)
        write_result(task.run, task.point.config.job["arguments"])
        return [PointResult(task=task, exit_code=0)]


def write_result(run: RunDir, arguments):
    loss = loss_of(arguments["lr"], arguments["k"])
    culprit = {"rank": 0, "node": "node0", "cause": "it cannot be", "log_tail": []}
    write_json(
        run.result,
        {
            "state": "failed" if loss is None else "finished",
            "updates": 4,
            "loss": loss,
            "seconds": 0.1,
            "metrics": {},
            "culprit": culprit if loss is None else None,
        },
    )


def run_to_end(search, trial_runs=None, given=(), output=QUIET):
    """A start of a search, to its end; its table."""
    with locked_sweep(search.folder):
        begun = Searcher(search, trial_runs or AtOnce(), output)
        begun.run(given)
    return begun.table
