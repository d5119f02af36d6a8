"""Hydra's configuration loader with this project's search path and resolvers."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import resources
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import hydra
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_search_path import SearchPathElement, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep, Sweep
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from orchestrator.config.changes import flat
from orchestrator.config.command_line import CommandLine
from orchestrator.config.schema import Config
from orchestrator.config.typed_text import TypedFile, refuse_unset
from orchestrator.errors import ConfigError, expand_user


def dense_parameters(layers: Sequence[int]) -> int:
    """Count the weights and biases of dense layers of these sizes.

    >>> dense_parameters([2, 3, 1])
    13
    """
    return sum(a * b + b for a, b in pairwise(layers))


def transformer_parameters(width: int, layers: int, context: int, tokens: int = 256) -> int:
    """Count the parameters of a transformer with biases, tied embeddings and learned positions.

    >>> transformer_parameters(64, 2, 128)
    124672
    """
    return width * (tokens + context + 2) + layers * (12 * width**2 + 13 * width)


def sum_of(*numbers: int) -> int:
    """Return the sum.

    >>> sum_of(1, 2, 4)
    7
    """
    return sum(numbers)


def when_null(value: Any, then: Any, otherwise: Any) -> Any:
    """Return `then` if a key is null, else `otherwise`: OmegaConf has no conditional."""
    return then if value is None else otherwise


OLDER_HYDRA = hydra.__version__.startswith("1.3.")
"""With OmegaConf 2.3; from 1.4 and 2.4 on, two of their names are others."""


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register a resolver with OmegaConf, in place of one of the same name."""
    if OLDER_HYDRA:
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    else:
        register: Any = OmegaConf.register_resolver
        register(name, resolver, replace=True, annotation_validation="off")


MOST_POINTS = 10_000
OF_THE_SWEEP = ("hydra", "sweep")  # sections of which a sweep has one, not each point
OF_A_SEARCH = ("search", "seed", "objective", "direction", "prune")  # in `sweep`; not `trials`
SEARCH_KEYS = tuple(f"sweep.{name}" for name in OF_A_SEARCH)
SHIPPED = "shipped"


class UserFirstSearchPath(ConfigSearchPathImpl):
    """A search path on which the shipped configuration always comes last.

    Hydra takes the first file of a name, and adds what `hydra.searchpath` says at the end.
    """

    def append(self, provider: str, path: str, anchor: SearchPathQuery | None = None) -> None:
        del anchor  # none is given
        elements = self.get_path()
        last = elements[-1].provider if elements else None
        index = len(elements)
        if last == SHIPPED and provider != "schema":
            index -= 1
        elements.insert(index, SearchPathElement(provider, path))


def search_path(config_dir: str | None) -> UserFirstSearchPath:
    """Return Hydra's own configuration, the user's folder, the shipped one, and the schema."""
    package = Path(__file__).resolve().parents[1]
    folders = (package / "conf", package.parent / "conf")  # of a wheel, of a checkout
    shipped = next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
    if shipped is None:
        raise ConfigError(
            f"the shipped configuration is missing: there is no conf/config.yaml in {package}"
        )
    path = UserFirstSearchPath()
    path.append("hydra", "pkg://hydra.conf")
    path.append(SHIPPED, f"file://{shipped}")
    if config_dir is not None:
        folder = expand_user(config_dir).resolve()
        if not (config_dir and folder.is_dir()):  # "" is an unset variable rather than this folder
            raise ConfigError(f"--config-dir must be a folder, but '{config_dir}' is not one")
        path.append("--config-dir", f"file://{folder}")
    for plugin in Plugins.instance().discover(SearchPathPlugin):
        plugin().manipulate_search_path(path)  # type: ignore[call-arg]
    path.append("schema", "structured://")
    return path


HYDRA_KEYS = ("hydra.mode", "hydra.searchpath", "hydra.sweep.dir", "hydra.sweep.subdir")
"""Hydra's own settings that have an effect here."""

_ELSEWHERE = ("hydra.run.dir", "hydra.sweeper.params", "hydra.sweeper._target_", "hydra/sweeper")
"""Further ones of files: the points of a sweep, and what the composition refuses with advice."""

_AS_HERE = {
    "hydra.job.chdir": False,
    "hydra.output_subdir": None,
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
}
"""Settings of Hydra's that ask for the only behaviour here."""


def _refuse_overridden(result: ConfigResult, name: str) -> None:
    """Raise `ConfigError` for a file that extends another, and yields to it in all that it sets."""
    own = False
    for default in result.defaults_list or ():
        path = default.path if isinstance(default, ConfigDefault) else None
        if own and path is not None and result.config:
            raise ConfigError(
                f"{name}: its defaults list {path} after _self_, so that {path} would override the "
                f"file's own settings; write _self_ after {path}"
            )
        own |= path == "_self_"


class Repository(ConfigRepository):
    """Configuration files, with texts as they were typed."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Read a file.

        Raises:
            ConfigError: it has settings of Hydra's that would be ignored, or values that YAML reads
                in another way than they look.
        """
        result = super().load_config(config_path)
        if result is None or result.provider in (SHIPPED, "hydra", "schema"):
            return result
        if not OmegaConf.is_dict(result.config):
            return result
        scheme, _, folder = result.path.partition("://")
        name = config_path if config_path.endswith(".yaml") else f"{config_path}.yaml"
        group = str(Path(config_path).parent).replace("/", ".").strip(".")
        package = result.header.get("package") or "_group_"
        package = package.replace("_group_", group).replace("_global_", "").strip(".")
        self._refuse_unused(result, package, name)
        _refuse_overridden(result, name)
        if scheme == "file":
            text = Path(folder, name).read_text(encoding="utf-8")
        else:
            text = resources.files(folder).joinpath(name).read_text(encoding="utf-8")
        TypedFile(result.config, text, package, name).keep_text()
        return result

    def _refuse_unused(self, result: ConfigResult, package: str, name: str) -> None:
        """Raise `ConfigError` for a file's settings of Hydra's that would be ignored."""
        values: Any = OmegaConf.to_container(result.config, resolve=False)
        settings = [(f"{package}.{key}".lstrip("."), value) for key, value in flat(values).items()]
        settings += [
            (str(default.group), default.value)
            for default in result.defaults_list or ()
            if isinstance(default, GroupDefault)
        ]
        unused = [
            key
            for key, value in settings
            if re.match(r"hydra[./]", key)
            and not key.startswith((*HYDRA_KEYS, *_ELSEWHERE, "hydra.help"))
            and not (key in _AS_HERE and value == _AS_HERE[key])
        ]
        if unused:
            raise ConfigError(
                f"{name}: {' and '.join(unused)} {'means' if len(unused) == 1 else 'mean'} nothing "
                f"here; of Hydra's own settings there are {', '.join(HYDRA_KEYS)}; leave "
                f"{'it' if len(unused) == 1 else 'them'} out"
            )


def _has_sweep(value: Any) -> bool:
    """Return whether a list or a dictionary contains a sweep, at any depth."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(part, Sweep) or _has_sweep(part) for part in parts)


class Loader(ConfigLoaderImpl):
    """Composes, and reads sweeps."""

    def __init__(self, config_dir: str | None) -> None:
        # Once in a process: storing the schema takes as long as reading all files.
        stored = ConfigStore.instance().repo.get("schema.yaml")
        if stored is None or OmegaConf.get_type(stored.node) is not Config:
            ConfigStore.instance().store(name="schema", node=Config)
        if OLDER_HYDRA:
            version.setbase("1.3")
        setup_globals()  # Hydra's own resolvers
        # `${now:…}` means this moment from here on: Hydra's own is another one in each composition,
        # which put a sweep's points into two folders wherever a second ended between them.
        register_resolver("now", datetime.now().astimezone().strftime)
        for resolver in (
            dense_parameters,
            transformer_parameters,
            sum_of,
            when_null,
            refuse_unset,
        ):
            register_resolver(resolver.__name__, resolver)
        super().__init__(search_path(config_dir))
        self.repository = Repository(self.config_search_path)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        return OverridesParser.create(config_loader=self).parse_overrides(list(overrides))

    def refuse_unusable_sweeps(self, overrides: Sequence[str]) -> None:
        """Raise `ConfigError` for a range without a step, or a sweep within another value."""
        for override in self.parse(overrides):
            value: Any = override.value()
            if isinstance(value, RangeSweep) and not value.step:
                raise ConfigError(f"{override.input_line}: the step of a range cannot be 0")
            parts = value.list if isinstance(value, ChoiceSweep) else value
            if _has_sweep(parts):
                raise ConfigError(
                    f"{override.input_line}: choice(), range() and interval() are no part of "
                    f"another value; list all values, as in {override.key_or_group}=1,2,3"
                )

    def swept(self, overrides: Sequence[str]) -> list[Override]:
        """Parse all overrides. Raises `ConfigError` for a sweep over keys that its points share."""
        parsed = self.parse(overrides)
        for override in parsed:
            section = override.key_or_group.replace("/", ".").partition(".")[0]
            if override.is_sweep_override() and section in OF_THE_SWEEP:
                raise ConfigError(
                    f"{override.input_line} cannot be swept: {section} holds for the sweep as a "
                    f"whole, and its points share it; state one value"
                )
        return parsed

    def refuse_sweep(self, overrides: Sequence[str]) -> None:
        """Raise `ConfigError` for a sweep over keys that all its points share, or of no point, or
        of too many points.
        """
        sizes = {  # counted without making a list of a long range
            o.key_or_group: sum(1 for _ in islice(o.sweep_string_iterator(), MOST_POINTS + 1))
            for o in self.swept(overrides)
            if o.is_discrete_sweep()
        }
        if math.prod(sizes.values()) > MOST_POINTS:
            raise ConfigError(f"{' and '.join(sizes)} make more than {MOST_POINTS} points")
        for key in (key for key, size in sizes.items() if not size):
            raise ConfigError(f"{key} has no value to sweep over: the sweep would have no point")

    def sweep_name(self, overrides: Sequence[str], line: CommandLine) -> str:
        """Return the name of a sweep's folder: the swept keys, and a digest of all else that was
        typed and matters to its points.
        """
        parsed = self.parse(overrides)
        swept = sorted({o.key_or_group for o in parsed if o.is_sweep_override()})
        settings = [o for o in parsed if not o.is_sweep_override()]
        outside = ("run", *OF_THE_SWEEP)
        fixed = [o for o in settings if o.key_or_group.split(".")[0] not in outside]
        # More values make more points of the same grid, but another search space is another search.
        if any(o.key_or_group == "sweep.search" for o in settings):
            fixed += [o for o in parsed if o.is_sweep_override()]
            fixed += [o for o in settings if o.key_or_group in SEARCH_KEYS]
        lines = sorted(str(o.input_line) for o in fixed)
        own = str(Path(line.config_dir).absolute()) if line.config_dir else ""
        made_of = repr((swept, lines, line.config_name, own))
        digest = hashlib.sha256(made_of.encode()).hexdigest()[:8]
        keys = "-".join(key.rpartition(".")[2].replace("/", "_") for key in swept)[:60]
        return f"sweep_{keys}{'_' if keys else ''}{digest}"
