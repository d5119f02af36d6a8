"""Writes a small project to start from: `python -m orchestrator new FOLDER`."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import sys
import tempfile
from pathlib import Path

from orchestrator.errors import UsageError, expand_user

JOB = '''\
"""Which of two spirals does a point belong to? Put your own model, data and loss here."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss


def spirals(count, seed):
    """Return points, shape (count, 2), and the spiral of each, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    turn = 6 * torch.rand(count, generator=generator).sqrt()
    angle = turn + torch.pi * labels
    return torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 6, labels


class Spirals(Job):
    metric_names = ("accuracy",)

    def __init__(self, samples: int = 2000, width: int = 64):
        self.samples, self.width = samples, width

    def model(self):
        wide = [nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, self.width), nn.Tanh()]
        return nn.Sequential(*wide, nn.Linear(self.width, 2))

    def dataset(self):
        return TensorDataset(*spirals(self.samples, seed=0))

    def loss(self, model, batch):
        points, labels = batch
        scores = model(points)
        total = functional.cross_entropy(scores, labels, reduction="sum")  # a sum, never a mean
        right = (scores.argmax(1) == labels).sum()
        return Loss(total, weight=len(labels), metrics={"accuracy": right})

    def validation(self):
        return TensorDataset(*spirals(1000, seed=1))
'''

AGENTS = """\
# For coding agents

The job is NAME/spirals.py, its settings are conf/. Run everything in this folder.

```bash
OURS="--config-dir conf --config-name main"
python -m orchestrator plan $OURS                                  # start nothing, show all
python -m orchestrator.launch $OURS train.updates=20 run.dir=runs/a -q  # returns at the end
python -m orchestrator wait runs/a --timeout 600 --json            # returns at the end, too
python -m orchestrator status runs --json                          # at any moment
python -m orchestrator logs runs/a                                 # what rank 0 printed
python -m orchestrator resume runs/a train.updates=30 -q           # train on
```

From Python a start does not wait, and the run outlives the process:

```python
import orchestrator

words = ["--config-dir", "conf", "--config-name", "main", "train.updates=20"]
run = orchestrator.start(*words, "run.dir=runs/b")
run.wait(timeout_s=600)  # TimeoutError leaves the run alone
print(run.state, run.result["loss"], run.best("held_out.accuracy")["update"])
print(orchestrator.open_run("runs/a").metrics[-1]["loss"])  # of another process, or day
```

- **Stop**: `python -m orchestrator cancel RUN` saves first, and `resume RUN` continues; `--now`
  ends it at once. Never kill processes by name. Only read what is in a run's folder.
- **Costs**: a run without `+cluster=` uses this machine alone. `+cluster=slurm` and `+cluster=site`
  submit to a cluster, where nodes x hours cost money, and `-m` does so for each point: ask first,
  with what `plan ... +cluster=site` prints.
- **Exit codes**: 0 finished; 1 failed (`status RUN --json`: `culprit` has rank, cause and last
  lines); 2 refused, nothing was started, and the message says what would do; 3 stopped, to be
  resumed; 124 `wait --timeout` is over, and the run goes on; 130 interrupted.
- **The job**: `loss` returns a sum and its weight, never a mean. It calls neither `backward()` nor
  collectives nor `.cuda()`. `python -m pytest` after each change.
"""

FILES = {
    "NAME/__init__.py": "",
    "NAME/spirals.py": JOB,
    "conf/main.yaml": """\
# The primary configuration: what a run is unless the command line says otherwise.
defaults:
  - base
  - override job: spirals
  - override optimizer: nesterov
  - _self_
accumulation: {global_batch: 200, steps: 2}
schedule: {base_lr: 0.1, warmup_updates: 20}
train: {epochs: 40, checkpoint_every: 50}
facts: {dataset_samples: "${job.samples}"}  # for plan, which builds no data set
""",
    "conf/job/spirals.yaml": """\
_target_: NAME.spirals.Spirals
samples: 2000
width: 64
""",
    "conf/optimizer/nesterov.yaml": """\
name: sgd
momentum: 0.9
nesterov: true
""",
    "conf/cluster/site.yaml": """\
# A SLURM cluster, for +cluster=site. Fill in what yours needs; to check it:
# python -m orchestrator doctor --config-dir conf +cluster=site
kind: slurm
nodes: 2
ranks_per_node: 2
time_min: 30
requeue: true
partition: null
account: null
""",
    "tests/test_spirals.py": """\
import subprocess
import sys

import pytest

from NAME.spirals import Spirals


def test_the_loss_of_a_batch_is_the_sum_of_those_of_its_parts():
    job = Spirals(samples=8)
    model, (points, labels) = job.model(), job.dataset()[:]
    parts = [job.loss(model, (points[part], labels[part])) for part in (slice(3), slice(3, 8))]
    whole = job.loss(model, (points, labels))
    assert whole.total.item() == pytest.approx(sum(part.total.item() for part in parts))
    assert whole.weight == sum(part.weight for part in parts)


def test_it_trains(tmp_path):
    config = ["--config-dir", "conf", "--config-name", "main", f"run.dir={tmp_path}/run"]
    command = [sys.executable, "-m", "orchestrator.launch", *config, "train.updates=5"]
    subprocess.run(command, check=True)
""",
    "README.md": """\
# NAME

```
OURS="--config-dir conf --config-name main"
python -m orchestrator plan $OURS                                   # which rank computes what
python -m orchestrator.launch $OURS run.dir=runs/first              # 2 simulated nodes x 2 ranks
python -m orchestrator resume runs/first train.epochs=60            # train it further
python -m orchestrator.launch $OURS -m accumulation.steps=1,2,4     # a sweep
python -m orchestrator.launch $OURS +cluster=site                   # on SLURM
python -m pytest
```

The job is NAME/spirals.py, and conf/main.yaml is the configuration of a run.
""",
    "AGENTS.md": AGENTS,
}


def write_project(folder: Path) -> Path:
    """Write a new project; its package has the folder's name.

    Returns:
        The folder.

    Raises:
        UsageError: it exists, or its name cannot be a package's. Nothing is written then.
    """
    folder = Path(expand_user(str(folder))).absolute()
    name = folder.name
    if folder.exists():
        raise UsageError(f"{folder} exists already; name a new folder")
    if not name.isidentifier() or keyword.iskeyword(name):
        near = re.sub(r"\W", "_", name)
        near = near if near.isidentifier() and not keyword.iskeyword(near) else f"my_{near}"
        raise UsageError(f"{name} cannot be the name of a Python package; try {near}")
    if name in ("conf", "tests"):
        raise UsageError(f"{name} is the name of another folder of the project; try my_{name}")
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        raise UsageError(f"{name} is an installed package already; try my_{name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as draft:
        project = Path(draft) / name
        for path, text in FILES.items():
            file = project / path.replace("NAME", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("NAME", name), encoding="utf-8")
        shutil.move(project, folder)
    return folder
