"""Configuration files as Hydra asks for them, each read once for all that one command composes.

Hydra reads a file anew for every composition, and a command makes several: with and without a
default that gives way, and who said what. What a file said at first it says to the end of the
command, so that all of them, and all points of a sweep, are made of the same words.
"""

from __future__ import annotations

import copy
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult


class Files(ConfigRepository):
    """Hydra's repository, which remembers what it has read."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self._read: dict[str, ConfigResult | None] = {}  # of these sources

    def __deepcopy__(self, _: dict[int, Any]) -> Files:
        """For one composition, which may want other sources but leaves those that are there alone:
        with them Hydra would copy all schemas that are stored.
        """
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._read:
            self._read[config_path] = super().load_config(config_path)
        found = self._read[config_path]
        return None if found is None else _Lent(found)


class _Lent(ConfigResult):
    """What was read, for one composition: its values are copied when they are asked for, since
    Hydra merges others into them. The list of defaults it copies by itself.
    """

    def __init__(self, found: ConfigResult) -> None:
        self._found = found
        self.provider, self.path, self.header = found.provider, found.path, found.header
        self.defaults_list, self.is_schema_source = found.defaults_list, found.is_schema_source

    def __getattr__(self, name: str) -> Any:
        if name != "config":
            raise AttributeError(name)
        self.config = copy.deepcopy(self._found.config)
        return self.config
