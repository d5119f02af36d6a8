"""The tracker Weights & Biases, offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import EXIT_CODES
from orchestrator.trainer.recorder import Tracker

# The scalars, and nothing of the machine, the code or what is printed: these stay ours.
QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


@dataclass
class WandBOptions:
    """`tracker.options` of `tracker.kind=wandb`."""

    project: str = "orchestrator"


class WandB(Tracker):
    """`tracker.kind=wandb`: offline, in the run's folder. Nothing is sent anywhere; `wandb sync`
    does that, when you want it.

    Every attempt has a folder of its own, under the same id.
    """

    Options = WandBOptions
    title = "what Weights & Biases is to keep"
    requires = ("wandb", "wandb")

    def __init__(self, run: RunDir, config: Config) -> None:
        super().__init__(run, config)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._end: Any = wandb.teardown
        run.wandb.mkdir(mode=0o700, exist_ok=True)
        folder = run.wandb / f"{len(list(run.wandb.iterdir())):03d}"
        folder.mkdir(mode=0o700)
        self._run: Any = wandb.init(
            dir=str(folder),
            mode="offline",
            project=self.options.project,
            name=run.path.name,
            id=run.identity,
            resume="allow",
            settings=wandb.Settings(**QUIET),
        )
        # Its own steps only grow, while an update comes twice after a resume.
        self._run.define_metric("*", step_metric="update")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"update": step, **values})

    def close(self) -> None:
        self._run.finish(EXIT_CODES[self.state])
        self._end()  # its service's process has written all, and is gone
