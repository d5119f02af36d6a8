"""A sweep as Hydra drives it: its sweeper chooses points, and our launcher gets them whole.

The sweeper is Hydra's own unless the configuration names another that is installed; the launcher is
always ours (`hydra_plugins/orchestrator_launcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from orchestrator.compose.composed import Composed
from orchestrator.compose.composer import Composer
from orchestrator.compose.hydra.input import guarded
from orchestrator.errors import ConfigError

OURS = "hydra_plugins.orchestrator_launcher"
Point = Composed | ConfigError
Launch = Callable[[Sequence[Point], int], Sequence[JobReturn]]


class Points:
    """Stands for the function that Hydra's sweepers run: our launcher asks it for whole batches.

    Attributes:
        folder: where a search writes what it has found, without making that folder itself.
    """

    __name__ = "orchestrator.launch"

    def __init__(self, composer: Composer, launch: Launch) -> None:
        self._composer, self._launch = composer, launch
        self.folder: Path | None = None

    def __call__(self, _: DictConfig) -> Any:
        """Raises always: a point alone is nothing that could be run."""
        raise ConfigError("points of a sweep are placed by the launcher 'orchestrator' alone")

    def launch_points(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Compose a batch of points and hand it on.

        Args:
            initial_job_idx: the number of its first.
        """
        points = self._composer.points(job_overrides, initial_job_idx)
        returned = self._launch(points, initial_job_idx)
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return returned


def drive(composer: Composer, launch: Launch) -> Any:
    """Let the sweeper choose points, and `launch` do what is to be done with each batch of them.

    Args:
        launch: gets points, or why one cannot be composed, and the number of the first.

    Returns:
        What the sweeper returns. Raises `ConfigError` for what cannot be swept.
    """
    found = composer.load(composer.overrides, RunMode.MULTIRUN)
    points = Points(composer, launch)
    with guarded(), open_dict(found):
        found.hydra.launcher = {"_target_": f"{OURS}.OrchestratorLauncher"}
        found.hydra.sweeper.params = dict(text.split("=", 1) for text in composer.params)
        if composer.searches:
            stated = OmegaConf.select(found, "run.dir")
            found.hydra.sweep.dir = str(stated or found.hydra.sweep.dir)
            points.folder = Path(found.hydra.sweep.dir)
        else:
            found.hydra.sweeper["_target_"] = f"{OURS}.OrchestratorSweeper"
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=HydraContext(config_loader=composer.loader, callbacks=Callbacks()),
            task_function=points,
            config=found,
        )
        composer.loader.refuse_sweep(composer.stated)
    theirs = f"the sweeper {found.hydra.sweeper['_target_']}" if composer.searches else ""
    with guarded(bounded=False, whose=theirs):
        return sweeper.sweep(list(composer.overrides))


def points_of(composer: Composer) -> list[Point]:
    """The points of the sweep that `composer` composes, or why one cannot be composed."""
    found: list[Point] = []

    def collect(points: Sequence[Point], _: int) -> Sequence[JobReturn]:
        found.extend(points)
        return [JobReturn(status=JobStatus.UNKNOWN) for _ in points]

    drive(composer, collect)
    return found
