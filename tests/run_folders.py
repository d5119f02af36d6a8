"""Folders of runs without training, their records, and consoles that keep their output."""

import io
import json

from rich.console import Console

from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir


class Screen(Console):
    """A console whose text can be read back; by default no terminal."""

    def __init__(self, width=80, encoding="utf-8", **options):
        self.raw = io.BytesIO()
        stream = io.TextIOWrapper(self.raw, encoding=encoding, errors="strict", newline="")
        super().__init__(file=stream, width=width, **options)

    @property
    def text(self) -> str:
        self.file.flush()
        return self.raw.getvalue().decode(self.file.encoding)


def make_run(path):
    """Make a run's folder as a start does, without training."""
    run = RunDir(path)
    run.create()
    run.write_config(to_yaml(compose(["train.updates=3"])))
    write_json(run.submission, {"cluster": "local"})
    write_json(run.plan, {"updates": 3, "ranks": 4})
    return run


def write_failure(run, rank, cause="ValueError: wrong", *, attempt=0, **changes):
    """Write what a rank leaves that fails by itself."""
    failure = {
        "rank": rank,
        "node": f"node{rank}",
        "time": 1.0,
        "cause": cause,
        "usage": False,
        "secondary": False,
    }
    write_json(run.failure(attempt, rank), failure | changes)


def record(update, attempt=0, **changes):
    """One line of metrics.jsonl as training writes it: 256 samples in 0.2 s, an update a second."""
    return {
        "update": update,
        "time": 1000.0 + update,
        "loss": 1 / (update + 1),
        "epoch": 0,
        "learning_rate": 0.001,
        "samples": 256,
        "weight": 256.0,
        "micro_steps": 4,
        "collectives": 1,
        "bytes_on_wire": 2 * 1024**2,
        "compute_s": 0.15,
        "wait_s": 0.03,
        "optimizer_s": 0.01,
        "update_s": 0.2,
        "peak_memory_bytes": 300 * 1024**2,
        "gradient_norm": None,
        "applied": True,
        "metrics": {},
        **changes,
        "attempt": attempt,
    }


def result(**changes):
    """A result.json of twenty updates."""
    return {
        "state": "finished",
        "updates": 20,
        "samples": 5120,
        "loss": 0.05,
        "metrics": {"accuracy": 0.9534},
        "weights_sha256": "0123456789abcdef" * 4,
        "peak_memory_bytes": [300 * 1024**2, 350 * 1024**2],
        "collectives": 20,
        "bytes_on_wire": 40 * 1024**2,
        "seconds": 4.5,
        "culprit": None,
        **changes,
    }


def maker(home):
    """Return a function that makes run folders, of five good updates unless `records` and `ended`
    say otherwise."""

    def make(name, *overrides, records=None, ended=None, **more):
        folder = home / name
        config = compose([*overrides, f"run.dir={folder}"])
        run = RunDir(folder)
        run.create()
        run.write_config(to_yaml(config))
        write_json(run.plan, Plan.of(config, JobFacts(dataset_samples=1437)).to_json())
        submission = {"overrides": list(overrides), "folder": str(home), **more}
        write_json(run.submission, submission)
        lines = [record(n) for n in range(5)] if records is None else records
        lines += [{"update": 4, "attempt": 0, "time": 1005.0, "evaluation": {"accuracy": 0.9}}]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if ended is not False:
            write_json(run.result, result() if ended is None else ended)
        run.begin_attempt()
        return run

    return make
