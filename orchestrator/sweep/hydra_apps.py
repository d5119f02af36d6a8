"""Points of any Hydra application that chooses our launcher: here in turn, or as one SLURM array.

Such an application has a function of its own that we know nothing of. It is called in one process a
point; what it returns, and whether it failed, comes back as Hydra's `JobReturn`. All points are
composed before the first is run or submitted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from orchestrator.config.app_place import AppPlace
from orchestrator.errors import ConfigError

LOOK_S = 0.1
FLAGS = ("partition", "account", "qos", "constraint", "exclude", "reservation", "comment")


class AppPoints:
    """The points of one application."""

    def __init__(self, context: HydraContext, task: TaskFunction, config: DictConfig) -> None:
        self._context, self._task, self._config = context, task, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], first: int, place: AppPlace
    ) -> Sequence[JobReturn]:
        """Compose all, then run all. Raises what composing raises, before anything has run.

        Args:
            first: the number of the first.
        """
        if place.kind not in ("local", "slurm"):
            raise ConfigError(
                f"hydra.launcher.cluster.kind must be local or slurm, but is '{place.kind}'"
            )
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        points = [
            self._composed(list(overrides), number)
            for number, overrides in enumerate(job_overrides, first)
        ]
        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        if place.kind == "slurm":
            return self._on_slurm(points, place)
        returns: list[JobReturn] = []
        for point in points:
            returns.append(self.run(point))
            configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        return returns

    def _composed(self, overrides: list[str], number: int) -> DictConfig:
        found = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(found):
            found.hydra.job.id, found.hydra.job.num = str(number), number
        return found

    def run(self, point: DictConfig) -> JobReturn:
        """One point to its end, in this process."""
        return run_job(
            hydra_context=self._context,
            task_function=self._task,
            config=point,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )

    def _on_slurm(self, points: Sequence[DictConfig], place: AppPlace) -> Sequence[JobReturn]:
        import submitit

        from orchestrator.scheduler.client import CONF, SlurmClient

        folder = Path(self._config.hydra.sweep.dir).absolute() / ".submitit"
        before = os.environ.get(CONF)
        os.environ.update(SlurmClient(place.slurm_conf).environment("sbatch"))
        try:
            executor = submitit.SlurmExecutor(folder=folder)
            executor.update_parameters(**_parameters(place, str(self._config.hydra.job.name)))
            state: dict[Any, Any] = Singleton.get_state()
            jobs = executor.map_array(_Point(self, state), points)
            return [_returned(job, point) for job, point in zip(jobs, points, strict=True)]
        finally:
            os.environ.pop(CONF, None)
            if before is not None:
                os.environ[CONF] = before


def _parameters(place: AppPlace, name: str) -> dict[str, Any]:
    """What submitit's executor is told of an array."""
    stated = {flag: getattr(place, flag) for flag in FLAGS if getattr(place, flag) is not None}
    if place.memory_gib is not None:
        stated["mem"] = f"{round(place.memory_gib * 1024)}M"
    return {
        "job_name": name,
        "cpus_per_task": place.cpus_per_rank,
        "ntasks_per_node": 1,
        "array_parallelism": place.parallel or 1000,
        **({"time": place.time_min} if place.time_min else {}),
        **({"gpus_per_node": place.gpus_per_node} if place.gpus_per_node else {}),
        "additional_parameters": stated,
    }


@dataclass(frozen=True)
class _Point:
    """What an element of the array runs: the launching process's own state first, as Hydra asks."""

    points: AppPoints
    state: Any

    def __call__(self, point: DictConfig) -> JobReturn:
        Singleton.set_state(self.state)
        setup_globals()
        return self.points.run(point)


def _returned(job: Any, point: DictConfig) -> JobReturn:
    """What a point came to; one whose job ended without a word has failed, with SLURM's reason."""
    while not job.paths.result_pickle.exists() and not job.done():
        time.sleep(LOOK_S)
    error = job.exception()
    if error is None:
        return job.result()
    failed = JobReturn(cfg=point, hydra_cfg=point, status=JobStatus.FAILED)
    failed.overrides = list(point.hydra.overrides.task)
    failed.return_value = error
    return failed
