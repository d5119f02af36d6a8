"""`hydra/launcher=orchestrator`: Hydra's launcher plug-in.

Hydra imports this at every start, so it imports nothing heavier than Hydra itself. The points of a
Hydra application that chooses it run here, one after another. Sweeps of `orchestrator.launch` do
not need it: `orchestrator.sweep` places all of their points together.
"""

# No `from __future__ import annotations`: Hydra loads this before its name is in sys.modules, where
# dataclasses would look up annotations that are text.
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class OrchestratorLauncher(Launcher):
    """Launches the points of a sweep in this process, one after another."""

    def __init__(self) -> None:
        self._context: HydraContext | None = None
        self._task: TaskFunction | None = None
        self._config: DictConfig | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        if self._context is None or self._task is None or self._config is None:
            raise RuntimeError("Hydra calls a launcher's setup() before its launch()")
        setup_globals()
        hydra, returned = self._config.hydra, []
        Path(hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            configure_log(hydra.hydra_logging, hydra.verbose)
            point = self._context.config_loader.load_sweep_config(self._config, list(overrides))
            with open_dict(point):
                point.hydra.job.id, point.hydra.job.num = str(number), number
            returned.append(
                run_job(
                    hydra_context=self._context,
                    task_function=self._task,
                    config=point,
                    job_dir_key="hydra.sweep.dir",
                    job_subdir_key="hydra.sweep.subdir",
                )
            )
        configure_log(hydra.hydra_logging, hydra.verbose)
        return returned


@dataclass
class LauncherConf:
    """`hydra.launcher` with this launcher."""

    _target_: str = "hydra_plugins.orchestrator_launcher.OrchestratorLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="orchestrator", node=LauncherConf, provider="orchestrator"
)
