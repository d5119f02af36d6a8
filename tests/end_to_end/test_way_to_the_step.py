"""How many files a reader opens from the command to `optimizer.step()`: those on the stacks of a
real launcher and a real rank in that moment, which docs/architecture.md lists.
"""

import re
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

from tests import helpers

HOUSE = helpers.ROOT / "orchestrator"
MOST_FILES = 8
STEPS = """
import os, time, traceback
from pathlib import Path
import torch
from tests.tiny_job import Tiny

class Shown(torch.optim.SGD):
    def step(self, closure=None):
        shown = Path("rank.stack")
        if os.environ["SLURM_PROCID"] == "0" and not shown.exists():
            files = [frame.filename for frame in traceback.extract_stack()]
            Path("unfinished").write_text(chr(10).join(files))
            Path("unfinished").rename(shown)
            while not Path("seen").exists():
                time.sleep(0.01)
        return super().step(closure)

class Steps(Tiny):
    def optimizer(self, model):
        return Shown(model.parameters(), lr=0.1)
"""
LAUNCH = """
import faulthandler, runpy, signal
faulthandler.register(signal.SIGUSR1, file=open("launcher.stack", "w"))
runpy.run_module("orchestrator.launch", run_name="__main__", alter_sys=True)
"""


def _launcher_where_it_waits(launcher, folder):
    """Its stack, outermost first, asked for until it does nothing but wait."""

    def waiting():
        launcher.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
        last = (folder / "launcher.stack").read_text().split("most recent call first")[-1]
        files = re.findall(r'File "(.*?)", line \d+', last)
        return files[::-1] if files and files[0].endswith("selectors.py") else None

    return helpers.until(waiting, what="a launcher that waits")


def _ours(stack):
    """What of a stack is of this project, what stands beside itself once."""
    named = [Path(file) for file in stack if Path(file).is_relative_to(HOUSE)]
    return [str(file.relative_to(HOUSE)) for file, _ in groupby(named)]


def _listed():
    """What docs/architecture.md says of it."""
    text = (helpers.ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## From the command to `optimizer.step()`")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")]
    return [re.findall(r"`([\w/]+\.py)", row) for row in rows if ".py" in row]


def test_few_files_and_none_twice_lie_between_the_command_and_the_step(tmp_path):
    (tmp_path / "shown_steps.py").write_text(STEPS)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "job._target_=shown_steps.Steps", "run.dir=run",
         helpers.SMALL, "train.updates=2"],
        cwd=tmp_path, env=helpers.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    shown = tmp_path / "rank.stack"
    helpers.until(lambda: shown.exists() or launcher.poll() is not None, what="the first step")
    stacks = []
    if shown.exists():
        stacks = [_launcher_where_it_waits(launcher, tmp_path), shown.read_text().splitlines()]
    (tmp_path / "seen").touch()
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, output
    launchers, ranks = map(_ours, stacks)
    files = [*launchers, *ranks]
    assert files[0] == "launch.py"
    assert len(files) == len(set(files)) <= MOST_FILES
    assert [launchers, ranks] == _listed()
