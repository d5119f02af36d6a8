"""config.yaml read strictly: plain values, each key once, nothing that unfolds.

The files that we write have no aliases, so a reader need not follow any: a few lines of them unfold
to gigabytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import RunFolderError


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.MarkedYAMLError(problem="it has an alias")
        return super().compose_node(parent, index)

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:  # as it is there
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.MarkedYAMLError(problem=f"it has the key {min(twice)!r} twice")
        return super().construct_mapping(node, deep=deep)


def load_table(path: Path, text: str, *, needed: Sequence[str]) -> dict[str, Any]:
    """The table that a YAML text is; `path` is for messages.

    Raises:
        RunFolderError: it is none, or lacks a key of `needed`.
    """
    try:
        value: Any = yaml.load(text, Loader=_Loader)  # noqa: S506  # a safe loader's child
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise RunFolderError(f"{path} is damaged: {problem}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged: it is not a table of settings")
    missing = [key for key in needed if key not in value]
    if missing:
        raise RunFolderError(f"{path} is damaged: it has no {missing[0]}")
    return value
