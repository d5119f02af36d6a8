"""Hydra's loader with a search path of ours, and what it knows of a composition: who said what.

The one module that knows Hydra's inner parts; `compose` gives them a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_search_path import SearchPathElement, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from orchestrator.compose import resolvers
from orchestrator.compose.hydra_input import MOST_POINTS, register_checked_files
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError

HYDRA_VERSION_BASE = "1.3"
SHIPPED = "shipped"
OURS = (SHIPPED, "hydra", "schema")
"""Sources that are nobody's own: what comes from elsewhere, the user has written."""


def config_folder() -> Path:
    """The folder with the shipped configuration: in an installed wheel, or beside the package."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(
        f"the shipped configuration is missing: there is no conf/config.yaml in {package}"
    )


class UsersFirst(ConfigSearchPathImpl):
    """A search path on which the shipped configuration comes last, whoever adds a folder when.

    Hydra takes the first file of a name, and adds what `hydra.searchpath` says at the end.
    """

    def append(self, provider: str, path: str, anchor: SearchPathQuery | None = None) -> None:
        del anchor  # nobody gives one
        found = self.get_path()
        last = found[-1].provider if found else None
        place = len(found) - 1 if last == SHIPPED and provider != "schema" else len(found)
        found.insert(place, SearchPathElement(provider, path))


def search_path(config_dir: str | None) -> UsersFirst:
    """Hydra's own configuration, the user's folder, the shipped one, and the schema."""
    path = UsersFirst()
    path.append("hydra", "pkg://hydra.conf")
    path.append(SHIPPED, f"file://{config_folder()}")
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir must be a folder, but {config_dir} is not one")
        path.append("--config-dir", f"file://{folder}")
    for plugin in Plugins.instance().discover(SearchPathPlugin):
        plugin().manipulate_search_path(path)  # type: ignore[call-arg]
    path.append("schema", "structured://")
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where one group's part of a composition comes from.

    Attributes:
        default: what the shipped file says that was chosen for the group although no user's file
            and no override chose it; None when somebody did, or nothing was chosen.
        stated: whether a file of the user's says anything in this section.
    """

    default: DictConfig | None
    stated: bool


class Loader(ConfigLoaderImpl):
    """Composes; says where a group's part comes from; takes the points of a sweep apart."""

    def __init__(self, config_dir: str | None) -> None:
        ConfigStore.instance().store(name="schema", node=Config)
        version.setbase(HYDRA_VERSION_BASE)
        register_checked_files(config_folder())
        setup_globals()  # Hydra's own resolvers
        resolvers.register()  # one of which replaces one of those
        super().__init__(search_path(config_dir))

    def origin(self, primary: str, overrides: Sequence[str], group: str) -> Origin:
        """Who chose what is in a group, and whether the user's files say something of it."""
        parsed, files = self._parse_overrides_and_create_caching_repo(primary, list(overrides))
        listed = create_defaults_list(
            repo=files,
            config_name=primary,
            overrides_list=parsed,
            prepend_hydra=True,
            skip_missing=True,
        )
        default, stated = None, False
        for entry in listed.defaults:
            assert entry.config_path is not None  # noqa: S101  # only empty entries have none
            loaded = files.load_config(entry.config_path)
            shipped = loaded is None or loaded.provider in OURS
            content = self._load_single_config(entry, files).config
            if not shipped:
                stated |= OmegaConf.select(content, group) is not None
            elif entry.override_key == group:
                chosen = listed.overrides.override_metadata.get(group)
                by = chosen.containing_config_path if chosen else entry.parent
                teller = files.load_config(by) if by else None
                theirs = teller is None or teller.provider not in OURS
                if not theirs and isinstance(content, DictConfig):
                    default = content
        return Origin(default=default, stated=stated)

    def points(self, overrides: Sequence[str]) -> list[list[str]]:
        """The overrides of each point of a sweep: all combinations, the last key fastest."""
        parsed = OverridesParser.create(config_loader=self).parse_overrides(list(overrides))
        swept = (o.sweep_string_iterator() for o in parsed if o.is_discrete_sweep())
        if (number := math.prod(sum(1 for _ in values) for values in swept)) > MOST_POINTS:
            raise ConfigError(f"a sweep of {number} points is too large; at most {MOST_POINTS}")
        return BasicSweeper.split_arguments(parsed, None)[0]

    def refuse_choices(self, overrides: Sequence[str]) -> None:
        """Raise Hydra's error for `key=a,b` where no sweep is asked for."""
        parsed = OverridesParser.create(config_loader=self).parse_overrides(list(overrides))
        self.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
