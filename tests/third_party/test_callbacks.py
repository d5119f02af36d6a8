"""Callbacks of other packages (`run.callbacks`): what they see, and how they stop a run."""

import json

import pytest

from orchestrator.errors import ConfigError
from orchestrator.plugins import CALLBACKS
from tests.helpers import ROOT, TINY, call, records, result, verb

WATCH = """
import json
from orchestrator import current_run
from orchestrator.callbacks import Callback

class Watch(Callback):
    def _write(self, *values):
        with open(current_run.folder / f"seen-{current_run.rank}.jsonl", "a") as file:
            file.write(json.dumps(values) + "\\n")

    def on_start(self, trained):
        self.trained = trained
        self._write("start", type(trained.job).__name__)

    def wants_stop(self, update):
        return update == 2 and current_run.rank == 1

    def norms(self):
        return {name: float(g.double().norm()) for name, g in self.trained.gradients().items()}

    def on_micro_step(self, update, done, steps):
        if done:
            self._write("leaf", update, done, self.norms())

    def on_boundary(self, done):
        samples = [list(one.indices) for one in done.window.micro_batches]
        self._write("boundary", done.window.update, done.report.losses, samples, self.norms())
"""
LOOP = """
import torch
import torch.distributed as dist
from orchestrator import Accumulator, Loss, current_run as run
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
model = torch.nn.Linear(4, 1)
ours = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), reduction="reproducible")
for window in run.windows(len(x), ours, global_batch=8, micro_batch=2, updates=6):
    for piece in window:
        total = ((model(x[piece]) - 1) ** 2).sum()
        ours.backward(Loss(total, weight=len(piece)))
    ours.boundary()
"""


@pytest.fixture
def where(tmp_path):
    """Install a package with a callback; return where it is found."""
    home = tmp_path / "installed"
    info = home / "watcher-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: watcher\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{CALLBACKS.group}]\nwatch = watcher:Watch\n")
    (home / "watcher.py").write_text(WATCH)
    return {"PYTHONPATH": f"{home}:{ROOT}"}


def seen(run, rank, kind):
    lines = map(json.loads, (run / f"seen-{rank}.jsonl").read_text().splitlines())
    return [line[1:] for line in lines if line[0] == kind]


def check(run, job):
    """Check what both ranks saw of updates 0 to 2, after which one of them has stopped both."""
    recorded = records(run)
    assert [line["update"] for line in recorded] == [0, 1, 2]
    for rank in (0, 1):
        assert seen(run, rank, "start") == [[job]]
    for update, line in enumerate(recorded):
        both = [seen(run, rank, "boundary")[update] for rank in (0, 1)]
        assert [one[0] for one in both] == [update, update]
        losses = [row for one in both for row in one[1]]
        samples = [piece for one in both for piece in one[2]]
        assert [weight for _, weight in losses] == [len(piece) for piece in samples]
        mean = sum(total for total, _ in losses) / sum(weight for _, weight in losses)
        assert mean == pytest.approx(line["loss"], rel=1e-12)
        assert both[0][3] == both[1][3]
        norm = sum(value**2 for value in both[0][3].values()) ** 0.5
        assert norm == pytest.approx(line["gradient_norm"], rel=1e-5)
        for rank, one in enumerate(both):
            leaves = [leaf for leaf in seen(run, rank, "leaf") if leaf[0] == update]
            assert [done for _, done, _ in leaves] == list(range(1, len(one[1]) + 1))
            assert len({json.dumps(norms) for *_, norms in leaves}) == len(leaves)


def test_a_callback_of_a_package_sees_leaves_and_gradients_of_a_job_and_stops_it(tmp_path, where):
    run = tmp_path / "run"
    words = (
        "cluster.nodes=1",
        "cluster.ranks_per_node=2",
        "accumulation.global_batch=24",
        "accumulation.micro_batch=4",
        "accumulation.steps=null",
        "train.updates=6",
        "accumulation.reduction=reproducible",
        "tracker=none",
    )
    call(TINY, *words, "run.callbacks=[watch]", f"run.dir={run}", code=3, **where)
    check(run, "Tiny")
    verb("resume", run, "run.callbacks=[]", code=0, **where)
    assert result(run)["updates"] == 6


def test_a_callback_of_a_package_sees_the_loop_of_a_program(tmp_path, where):
    run = tmp_path / "run"
    (tmp_path / "train.py").write_text(LOOP)
    words = ("cluster.nodes=1", "cluster.ranks_per_node=2", "run.callbacks=[watch]")
    program = (f"run.dir={run}", "--", "train.py")
    call(*words, *program, cwd=tmp_path, code=3, **where)
    check(run, "NoneType")


def test_unregistered_name_is_refused():
    done = call(TINY, "run.callbacks=[wach]", "--cfg", "job", code=2)
    assert "run.callbacks must be one of" in done.stderr
    with pytest.raises(ConfigError, match=r"run\.callbacks must be one of"):
        CALLBACKS.load("wach", object)
