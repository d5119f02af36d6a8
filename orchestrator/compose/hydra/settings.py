"""Hydra's own settings that mean nothing here, because runs are placed and kept by us: refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from orchestrator.compose.wording import OWN_LAUNCHER
from orchestrator.config.app_place import AppPlace
from orchestrator.errors import ConfigError

CORE = "hydra._internal.core_plugins"
BASIC_SWEEPER = f"{CORE}.basic_sweeper.BasicSweeper"
LAUNCHERS = (
    f"{CORE}.basic_launcher.BasicLauncher",
    "hydra_plugins.orchestrator_launcher.OrchestratorLauncher",
)
UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "launcher._target_": (LAUNCHERS, OWN_LAUNCHER.format("hydra/launcher")),
    "launcher.cluster": ((asdict(AppPlace()),), "points run where the section cluster says"),
    "sweeper.max_batch_size": ((None,), "all points of a sweep are checked before one runs"),
    "run.dir": ((".", "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"), "a run's folder is run.dir=…"),
    "output_subdir": ((None, ".hydra"), "a run's folder says all of it: config.yaml"),
    "job.chdir": ((None, False), "a run works in the folder that it was started from"),
    "job.env_set": (({},), "variables of the ranks are cluster.environment={NAME: value}"),
    "job.env_copy": (([],), "variables of the ranks are cluster.environment={NAME: value}"),
    "callbacks": (({},), "nothing of Hydra's runs here; metrics.jsonl is written every update"),
}  # fmt: skip
"""Key below `hydra`: the values that change nothing, and what to do instead."""


PARAMS = "hydra.sweeper.params"
SECTIONS = ("sweeper", "launcher", "job", "run", "sweep")


def refuse_replaced(hydra: DictConfig) -> None:
    """Raise `ConfigError` where a section of Hydra's settings became a single value."""
    for name in SECTIONS:
        if not OmegaConf.is_dict(OmegaConf.select(hydra, name)):
            raise ConfigError(
                f"hydra.{name} is a group of settings of Hydra's own and cannot be one value; "
                f"leave hydra.{name} out"
            )


def refuse_typed_params(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` where what a file says of a sweep was typed; OmegaConf falls over it."""
    for override in overrides:
        if override.lstrip("+~").startswith(PARAMS):
            raise ConfigError(
                f"{PARAMS} is a file's way to say what is swept; on the command line each "
                f"parameter stands for itself, as in -m train.seed=1,2"
            )


def refuse_unused(hydra: DictConfig) -> None:
    """Raise `ConfigError` for what is set below `hydra` and would be ignored."""
    wrong: list[str] = []
    for key, (harmless, way) in UNUSED.items():
        parent, _, leaf = key.rpartition(".")
        node = OmegaConf.select(hydra, parent) if parent else hydra
        value = OmegaConf.to_container(node).get(leaf) if node else None  # type: ignore[union-attr]
        if value is not None and value not in harmless:
            wrong.append(f"hydra.{key}={value} means nothing here: {way}")
    if wrong:
        raise ConfigError("\n".join(wrong))
