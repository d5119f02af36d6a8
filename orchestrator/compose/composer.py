"""From a command line to a checked `Config`. The one place where configurations are composed.

A launch, a plan, a point of a sweep and `--cfg job` all come through `Composer`, so what one shows
is what another runs. What a default file set gives way to what the user states here, in the
composition itself; nothing is taken out of a configuration afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from orchestrator.compose.alike import Alike
from orchestrator.compose.command_line import PRIMARY, CommandLine, check_overrides, key_of, spelled
from orchestrator.compose.composed import Composed, at_home
from orchestrator.compose.hydra.input import check_arguments, guarded
from orchestrator.compose.hydra.loader import Loader
from orchestrator.compose.hydra.settings import (
    BASIC_SWEEPER,
    refuse_replaced,
    refuse_typed_params,
    refuse_unused,
)
from orchestrator.config.schema import Config
from orchestrator.config.user_code.job_source import builds_optimizer
from orchestrator.errors import ConfigError

IDENTITY = {"job": ("_target_",), "optimizer": ("_target_", "name")}
"""What says which job or optimizer a section describes; its other keys are that one's arguments."""


class Composer:
    """Composes what one command line asks for, and the points of its sweep.

    Raises:
        ConfigError: `--config-dir` is no folder.
    """

    def __init__(self, line: CommandLine) -> None:
        check_arguments(line.overrides)
        self.line = line
        self.params: list[str] = []  # what the configuration itself sweeps over
        self.searches = False  # whether points are chosen by what came of earlier ones,
        self.own_search = False  # by us
        self.loader = Loader(line.config_dir)
        telling = [f"{section}.{key}" for section, keys in IDENTITY.items() for key in keys]
        self._alike = Alike(self.loader, line.config_name, telling)
        OmegaConf.register_new_resolver("sweep_name", lambda: self._sweep_name, replace=True)

    @cached_property
    def _sweep_name(self) -> str:
        """The name of the folder of this line's sweep: the same for the same keys, whatever values
        they are swept over, so that the line typed again finds what it has made.
        """
        with guarded():
            return self.loader.sweep_name(self.overrides, self.line)

    def compose(self) -> Composed:
        """The configuration of a run, or what all points of a sweep have in common.

        Raises:
            ConfigError: what cannot be composed, in words.
        """
        mode = RunMode.MULTIRUN if self.line.multirun else RunMode.RUN
        with guarded():
            refuse_typed_params(self.line.overrides)
            found = self.load(self.overrides, mode)
            asked = OmegaConf.select(found, "hydra.mode")
            if asked == RunMode.RUN and self.line.multirun:
                raise ConfigError("-m asks for a sweep, but hydra.mode=RUN for none; leave one out")
            sweeps = self.line.multirun or asked == RunMode.MULTIRUN
            if not sweeps:
                self.loader.refuse_choices(self.overrides)
            refuse_replaced(found.hydra)
            theirs = found.hydra.sweeper.get("_target_") != BASIC_SWEEPER
            self.own_search = OmegaConf.select(found, "sweep.search") not in (None, "none")
            if theirs and self.own_search:
                raise ConfigError(
                    "sweep.search and hydra/sweeper=… are two searches; leave one of them out"
                )
            self.searches = theirs or self.own_search
            if self.own_search and not sweeps and not self.line.cfg:
                raise ConfigError("sweep.search chooses the points of a sweep, so it needs -m")
            params = found.hydra.sweeper.get("params") or {}
            self.params = [spelled(f"{key}={value}") for key, value in params.items()]
            if sweeps:
                self.loader.refuse_twice(self.overrides)
            return self._composed(found, self.line.overrides, sweeps=sweeps)

    @property
    def overrides(self) -> list[str]:
        """As Hydra takes them."""
        sweep = self.line.multirun
        return [spelled(override, sweep=sweep) for override in self.line.overrides]

    @property
    def stated(self) -> list[str]:
        """What is swept over: the configuration's own words, and the line's."""
        return [*self.params, *self.overrides]

    def points(
        self, overrides: Sequence[Sequence[str]], first: int = 0
    ) -> list[Composed | ConfigError]:
        """These points of the sweep that `compose` found, or why one cannot be composed.

        Args:
            first: the number of the first.
        """
        found: list[Composed | ConfigError] = []
        for number, given in enumerate(overrides, first):
            try:
                found.append(self._point(number, [spelled(override) for override in given]))
            except ConfigError as error:
                found.append(error)
        return found

    def _point(self, number: int, overrides: Sequence[str]) -> Composed:
        with guarded():
            if alike := self._alike.composed(number, overrides):
                return alike
            self.loader.interpolated.clear()
            found = self.load(overrides, RunMode.RUN)
            with open_dict(found.hydra.job):
                found.hydra.job.num, found.hydra.job.id = number, str(number)
            whole = self._composed(found, overrides)
            self._alike.keep(overrides, found, whole)
            return whole

    def load(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        """Compose; again without each shipped default that the user's statements replace.

        Args:
            overrides: as Hydra takes them.
        """
        given = list(overrides)
        while True:
            found = self._loaded(given, mode)
            group = next((g for g in IDENTITY if self._gives_way(g, found, given)), None)
            if group is None:
                return found
            given.append(f"~{group}")

    def _loaded(self, given: list[str], mode: RunMode) -> DictConfig:
        name = self.line.config_name
        try:
            return self.loader.load_configuration(name, given, mode, validate_sweep_overrides=False)
        except HydraException as error:
            if "Multiple values for cluster" not in str(error):
                raise
        # The primary configuration lists the group after all: here Hydra wants no plus.
        given[:] = [o.removeprefix("+") if key_of(o) == "cluster" else o for o in given]
        return self.loader.load_configuration(name, given, mode, validate_sweep_overrides=False)

    def _gives_way(self, group: str, found: DictConfig, given: Sequence[str]) -> bool:
        """Whether a shipped file that nobody chose describes another job (or optimizer) than the
        one that is stated, so that its keys are not meant for it.
        """
        section = OmegaConf.select(found, group)
        if not section or f"~{group}" in given:  # there is no file of the group any more
            return False
        keys = [key_of(override) for override in given]
        typed = any(key == group or key.startswith(f"{group}.") for key in keys)
        target = OmegaConf.select(found, "job._target_")
        own = group == "optimizer" and isinstance(target, str) and builds_optimizer(target)
        files = self.line.config_dir or OmegaConf.select(found, "hydra.searchpath")
        if not (typed or own or files):
            return False
        origin = self.loader.origin(self.line.config_name, given, group)
        if origin.default is None:
            return False
        default = OmegaConf.select(origin.default, group)
        if any(OmegaConf.select(section, k) != default.get(k) for k in IDENTITY[group]):
            return True
        return bool(own and not origin.stated and not typed)

    def _composed(
        self, found: DictConfig, overrides: Sequence[str], *, sweeps: bool = False
    ) -> Composed:
        refuse_unused(found.hydra)
        HydraConfig.instance().set_config(found)  # for ${hydra:…}
        values: dict[str, Any] = {}
        for key in found:
            if key != "hydra":
                node = found[key]
                plain = (
                    OmegaConf.to_container(node, resolve=True)
                    if OmegaConf.is_config(node)
                    else node
                )
                values[str(key)] = at_home(plain) if key == "job" else plain
        sweep = found.hydra.sweep
        return Composed(
            values=values,
            overrides=tuple(overrides),
            sweeps=sweeps,
            sweep_folder=Path(sweep.dir),
            point_folder=Path(
                sweep.dir, "" if OmegaConf.is_missing(found.hydra.job, "num") else str(sweep.subdir)
            ),
        )


def compose(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str = PRIMARY
) -> Config:
    """Compose and check, as a launch would. Raises `ConfigError`."""
    check_overrides(overrides)
    line = CommandLine(overrides=tuple(overrides), config_dir=config_dir, config_name=config_name)
    return Composer(line).compose().config()
