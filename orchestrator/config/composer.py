"""Composition of a command line, or of a sweep's points, into checked configurations."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from orchestrator.config.changes import flat
from orchestrator.config.command_line import PRIMARY, CommandLine, check_overrides, key_of, to_hydra
from orchestrator.config.job_source import builds_optimizer
from orchestrator.config.loader import HYDRA_KEYS, Loader, register_resolver
from orchestrator.config.messages import config_errors
from orchestrator.config.program import is_program
from orchestrator.config.reading import RUN_FOLDER, map_texts, read_config, unknown_keys
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A composed configuration as plain values, not yet checked.

    Attributes:
        values: every interpolation resolved; none of a sweep by -m, whose points have their own.
        overrides: that it was composed with, as typed.
        flags: that choose the configuration's files, for the same line in this folder.
        sweeps: whether a sweep is asked for, by -m or by the configuration itself.
        point_folder: of this point in the sweep's folder, or that folder, unless `run.dir` says
            otherwise.
    """

    values: dict[str, Any]
    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    sweeps: bool
    point_folder: Path

    def config(self) -> Config:
        """Check the values against the schema and the rules.

        Raises:
            ConfigError: unknown keys, wrong types, values that cannot be used.
        """
        if sentences := unknown_keys(self.values):
            raise ConfigError("\n".join(sentences))
        with config_errors():
            return read_config(self.values)


def _expand_home(text: str) -> str:
    return str(Path(text).expanduser()) if text.startswith("~/") else text


def _resolve_section(composition: DictConfig, key: Any) -> Any:
    """Return a section with its interpolations resolved; in `job`, the run's folder stays open."""
    node = composition[key]
    if not OmegaConf.is_config(node):
        return node
    if key == "job" and "${run.dir}" in str(OmegaConf.to_container(node, resolve=False)):
        composition = copy.deepcopy(composition)
        OmegaConf.update(composition, "run.dir", RUN_FOLDER)
        node = composition[key]
    values: Any = OmegaConf.to_container(node, resolve=True)
    if key == "cluster":  # no shell expands these two
        paths = ("environment", "container")
        return {**values, **{name: map_texts(values[name], _expand_home) for name in paths}}
    if key != "job":
        return values
    # A program's command has been through a shell already, which expands `~/`.
    verbatim = {"command": values["command"]} if is_program(values) else {}
    return {**map_texts(values, _expand_home), **verbatim}


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in nested dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def refuse_missing(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a value that is OmegaConf's `???`, which marks one to be set."""
    for key, value in flat(values).items():
        if value == "???" or (isinstance(value, list) and "???" in value):
            raise ConfigError(f"{key} is ???, so it has to be set: {key}=VALUE")


def refuse_null_in_text(composition: DictConfig, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a text such as `${run.name}/log` whose `run.name` is null."""
    leaves = flat(values)
    suspects = [key for key in leaves if any("None" in t for t in _texts(leaves[key]))]
    raw: Any = OmegaConf.to_container(composition, resolve=False) if suspects else {}
    typed = flat(raw)
    for key in suspects:
        text = str(typed.get(key))
        for name in re.findall(r"(?<!\\)\$\{([A-Za-z_][\w.]*)\}", text):
            if OmegaConf.select(composition, name) is None:
                raise ConfigError(f"{key}={text}: {name} is null; set it, or leave {key} out")


def resolve(composition: DictConfig) -> dict[str, Any]:
    """Return a composition as plain values, without `hydra`.

    Raises:
        ConfigError: a text holds a null, or a value is `???`.
    """
    sections = [str(key) for key in composition if key != "hydra"]
    values = {
        key: "???" if OmegaConf.is_missing(composition, key) else _resolve_section(composition, key)
        for key in sections
    }
    refuse_missing(values)
    refuse_null_in_text(composition, values)
    return values


RUN_DIR_OF_HYDRA = "."  # as base.yaml has it
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def refuse_unused(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for typed settings of Hydra's that would be ignored, or break it."""
    for override in overrides:
        key = key_of(override)
        if re.match(r"hydra[./]", key) and key not in HYDRA_KEYS:
            raise ConfigError(
                f"{key} means nothing here; of Hydra's own settings there are "
                f"{', '.join(HYDRA_KEYS)}; leave {key} out"
            )


IDENTITY = ("job._target_", "job.command", "optimizer._target_", "optimizer.name")
"""Keys on which the choice of the shipped default job and optimizer depends. Points share a
composition only where they state the same for these, as in `-m job._target_=my.Job train.seed=1,2`.
"""
OTHER_OF_HYDRA = re.compile(r"\$\{hydra(?::|\.(?!job\.(?:num|id)\}))")
MAX_SHARED = 64  # compositions, of some MiB each


def _is_value(override: Override) -> bool:
    """Return True for an override that sets a single value, and chooses or deletes nothing."""
    key, value = override.key_or_group, override.value()
    plain = isinstance(value, int | float | str) and "${" not in str(value)
    chooses = "." not in key or key in IDENTITY or key.startswith("hydra.")
    return plain and not chooses and not override.is_delete()


def _is_shareable(composition: DictConfig, parsed: Sequence[Override]) -> bool:
    """Return True if other values of the overrides that `_is_value` could change nothing but their
    own keys in this composition.
    """
    raw: Any = OmegaConf.to_container(composition, resolve=False)
    composed = flat(raw)
    sweep = str(raw["hydra"]["sweep"])
    identity = str([composed.get(key) for key in IDENTITY])
    if OTHER_OF_HYDRA.search(str({**raw, "hydra": sweep})) or "${." in sweep or "${" in identity:
        return False
    # A text without a dot in its key chooses a file, which comes before all values.
    prefixes = [
        f"{o.key_or_group}."
        for o in parsed
        if "." in o.key_or_group or not isinstance(o.value(), str)
    ]
    for key in (o.key_or_group for o in parsed if _is_value(o)):
        value = composed.get(key)
        if value is None or isinstance(value, dict | list) or "${" in str(value):
            return False
        overlapping = [o for o in prefixes if o.startswith(f"{key}.") or f"{key}.".startswith(o)]
        if len(overlapping) > 1:
            return False
    return True


class Composer:
    """Composes the configuration of one command line, and the points of its sweep.

    Raises:
        ConfigError: `--config-dir` is no folder.
    """

    def __init__(self, line: CommandLine) -> None:
        self.line = line
        self.params: list[str] = []  # the sweeps in the configuration itself
        self.search = "none"
        self.run_dir: str | None = None  # as stated for all points of a sweep, with interpolations
        self.loader = Loader(line.config_dir)
        self._shared: dict[tuple[str | None, ...], DictConfig] = {}  # see `point`
        register_resolver("sweep_name", lambda: self._sweep_name)

    @cached_property
    def _sweep_name(self) -> str:
        """The name of this sweep's folder. It depends on the swept keys, not on their values, so
        the same line finds its folder again.
        """
        with config_errors():
            return self.loader.sweep_name(self.overrides, self.line)

    def compose(self) -> Composed:
        """Compose the configuration of a run, or the part that all points of a sweep share.

        Raises:
            ConfigError: the configuration cannot be composed.
        """
        mode = RunMode.MULTIRUN if self.line.multirun else RunMode.RUN
        with config_errors():
            refuse_unused(self.line.overrides)
            self.loader.refuse_unusable_sweeps(self.overrides)
            composition = self.load(self.overrides, mode)
            configured_mode = OmegaConf.select(composition, "hydra.mode")
            if configured_mode == RunMode.RUN and self.line.multirun:
                raise ConfigError("-m asks for a sweep, but hydra.mode=RUN for none; leave one out")
            sweeps = self.line.multirun or configured_mode == RunMode.MULTIRUN
            if not sweeps:
                self.loader.validate_sweep_overrides_legal(
                    self.loader.parse(self.overrides), RunMode.RUN, from_shell=True
                )
            own_run: Any = OmegaConf.to_container(composition.hydra.run, resolve=False)
            if own_run["dir"] != RUN_DIR_OF_HYDRA:
                raise ConfigError(
                    f"hydra.run.dir={own_run['dir']} means nothing here: a run's folder is run.dir"
                )
            if composition.hydra.sweeper.get("_target_") != BASIC_SWEEPER:
                raise ConfigError("another hydra/sweeper is not available; try sweep.search=tpe")
            self.search = str(OmegaConf.select(composition, "sweep.search") or "none")
            run_section: Any = OmegaConf.to_container(composition.run, resolve=False)
            self.run_dir = run_section["dir"]
            if self.search != "none" and not sweeps and not self.line.cfg:
                raise ConfigError("sweep.search chooses the points of a sweep, so it needs -m")
            params = composition.hydra.sweeper.get("params") or {}
            self.params = [to_hydra(f"{key}={value}") for key, value in params.items()]
            HydraConfig.instance().set_config(composition)  # for ${hydra:…}
            # In a sweep only points run, and values may refer to swept ones, not set here.
            points_only = self.line.multirun or (sweeps and not self.line.cfg)
            values = {} if points_only else resolve(composition)
            return self._composed(composition, self.line.overrides, values, sweeps=sweeps)

    @property
    def overrides(self) -> list[str]:
        """The line's overrides in Hydra's grammar."""
        sweep = self.line.multirun
        return [to_hydra(override, sweep=sweep) for override in self.line.overrides]

    @property
    def explicit_overrides(self) -> list[str]:
        """Return all overrides of a sweep: the configuration's own, and the line's, which win."""
        typed = {key_of(override): override for override in self.overrides}
        own = {key_of(param): typed.get(key_of(param), param) for param in self.params}
        return [*own.values(), *(o for o in self.overrides if key_of(o) not in own)]

    def combinations(self) -> list[list[str]]:
        """Return the overrides of each point: all combinations of the swept values.

        Raises:
            ConfigError: the line cannot be swept.
        """
        with config_errors():
            self.loader.refuse_sweep(self.explicit_overrides)
            [combinations] = BasicSweeper.split_arguments(
                self.loader.parse(self.explicit_overrides), None
            )
        return combinations

    def point(self, number: int, typed_overrides: Sequence[str]) -> Composed:
        """Compose a point of the sweep, or set its values in the composition of an earlier one.

        Hydra takes a tenth of a second to compose. Points share a composition if they differ in
        single values only, each of which changes nothing but its own key.

        Raises:
            ConfigError: it cannot be composed.
        """
        overrides = [to_hydra(override) for override in typed_overrides]
        with config_errors():
            parsed = self.loader.parse(overrides)
            kind = tuple(o.get_key_element() if _is_value(o) else o.input_line for o in parsed)
            shared = self._shared.get(kind)
            composition = self.load(overrides, RunMode.RUN) if shared is None else shared
            with read_write(composition.hydra), open_dict(composition.hydra.job):
                composition.hydra.job.num, composition.hydra.job.id = number, str(number)
            if shared is not None:
                for override in filter(_is_value, parsed):
                    OmegaConf.update(composition, override.key_or_group, override.value())
            else:
                HydraConfig.instance().set_config(composition)  # a copy, for ${hydra:…}
                if len(self._shared) < MAX_SHARED and _is_shareable(composition, parsed):
                    self._shared[kind] = composition
            return self._composed(composition, overrides, resolve(composition))

    def load(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        """Compose; where no job or no optimizer is stated, choose the shipped default.

        Args:
            overrides: as Hydra takes them.
        """
        # Keys of a default can be deleted only once it is chosen.
        deletions = [o for o in overrides if o.startswith(("~job.", "~optimizer."))]
        composition = self._loaded([o for o in overrides if o not in deletions], mode)
        defaults = self._defaults(composition, {key_of(o) for o in overrides})
        if not (defaults or deletions):
            return composition
        return self._loaded([*overrides, *defaults], mode)

    def _loaded(self, overrides: list[str], mode: RunMode) -> DictConfig:
        name = self.line.config_name
        try:
            composition = self.loader.load_configuration(
                name, overrides, mode, validate_sweep_overrides=False
            )
        except ConfigCompositionException:
            if overrides:  # they may fail for want of the keys that base defines
                self._loaded([], mode)
            raise
        if OmegaConf.get_type(composition) is not Config:
            own = Path(self.line.config_dir or "", "base.yaml").expanduser()
            if self.line.config_dir and own.exists():
                raise ConfigError(
                    f"{own} hides the shipped base, which defines every key; rename it"
                )
            raise ConfigError(
                f"the primary configuration '{name}.yaml' does not extend base, which defines "
                "every key; begin it with: defaults: [base, _self_]"
            )
        return composition

    def _defaults(self, composition: DictConfig, typed: Collection[str]) -> list[str]:
        """Return choices of the shipped job and optimizer for a composition that names none."""
        listed = OmegaConf.select(composition, "hydra.runtime.choices") or {}
        job = OmegaConf.select(composition, "job") or {}
        optimizer = OmegaConf.select(composition, "optimizer") or {}
        target = OmegaConf.select(composition, "job._target_")
        chosen: list[str] = []
        if not (target or "command" in job or "job" in typed) and "job" in listed:
            chosen.append("job=digits")
        own = isinstance(target, str) and builds_optimizer(target) and not optimizer
        named = own or is_program(job) or not {"name", "_target_"}.isdisjoint(optimizer)
        if not (named or "optimizer" in typed) and "optimizer" in listed:
            chosen.append("optimizer=adam")
        return chosen

    def _composed(
        self,
        composition: DictConfig,
        overrides: Sequence[str],
        values: dict[str, Any],
        *,
        sweeps: bool = False,
    ) -> Composed:
        sweep = composition.hydra.sweep
        return Composed(
            values=values,
            overrides=tuple(overrides),
            flags=self.line.flags,
            sweeps=sweeps,
            point_folder=Path(
                sweep.dir,
                "" if OmegaConf.is_missing(composition.hydra.job, "num") else str(sweep.subdir),
            ),
        )


def compose(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str = PRIMARY
) -> Config:
    """Compose the configuration of a run, or the part that all points of a sweep share."""
    check_overrides(overrides)
    line = CommandLine(overrides=tuple(overrides), config_dir=config_dir, config_name=config_name)
    return Composer(line).compose().config()


def print_help(composer: Composer) -> None:
    """Print how to start a run, and the choices of each group, whatever else is typed."""
    with config_errors():
        composition = composer.load([], RunMode.RUN)
    sys.stdout.write(f"{composition.hydra.help.header}\n\nChoices (as in job=digits):\n")
    for group in sorted(composer.loader.list_groups("")):
        if group != "hydra":
            choices = composer.loader.get_group_options(group)
            sys.stdout.write(f"  {group}: {', '.join(choices)}\n")
