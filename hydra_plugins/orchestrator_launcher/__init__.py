"""`hydra/launcher=orchestrator`: Hydra hands all points of a sweep over at once, and we place them.

Hydra imports this at every start, so nothing here is heavier than Hydra itself. A sweep of ours
(`python -m orchestrator.launch -m …`) takes this launcher by itself; any other Hydra application
may choose it, here or on SLURM: `hydra.launcher.cluster={kind: slurm, partition: short}`.
"""

# No `from __future__ import annotations`: Hydra loads this before its name is in sys.modules, where
# dataclasses would look up annotations that are text.
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from orchestrator.config.app_place import AppPlace


class OrchestratorLauncher(Launcher):
    """Places points: those of our own command as runs, another application's as what they are.

    Args:
        cluster: where another application's points run.
    """

    def __init__(self, cluster: DictConfig | None = None) -> None:
        self._place: Any = AppPlace() if cluster is None else OmegaConf.to_object(cluster)
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
        own = getattr(self._task, "launch_points", None)
        if own is not None:
            return own(job_overrides, initial_job_idx)
        from orchestrator.sweep.hydra_apps import AppPoints

        points = AppPoints(self._context, self._task, self._config)
        return points.launch(job_overrides, initial_job_idx, self._place)


class OrchestratorSweeper(BasicSweeper):
    """Hydra's own sweeper, which hands all points over at once and writes nothing before."""

    def sweep(self, arguments: list[str]) -> Any:
        if self.hydra_context is None or self.launcher is None:
            raise RuntimeError("Hydra calls a sweeper's setup() before its sweep()")
        stated = [f"{key}={value}" for key, value in (self.params or {}).items()]
        loader = self.hydra_context.config_loader
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*stated, *arguments])
        [points] = self.split_arguments(parsed, None)
        return [self.launcher.launch(points, initial_job_idx=0)]


@dataclass
class LauncherConf:
    """`hydra.launcher` with this launcher."""

    _target_: str = "hydra_plugins.orchestrator_launcher.OrchestratorLauncher"
    cluster: AppPlace = field(default_factory=AppPlace)


ConfigStore.instance().store(
    group="hydra/launcher", name="orchestrator", node=LauncherConf, provider="orchestrator"
)
