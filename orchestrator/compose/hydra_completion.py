"""Hydra's own completion, asked for one word; imported only when a tab is pressed."""

from __future__ import annotations

from hydra.plugins.completion_plugin import DefaultCompletionPlugin


class HydrasCompletion(DefaultCompletionPlugin):
    """Knows the groups, choices, keys and values of a loader's configuration."""

    def choices(self, config_name: str, line: str) -> list[str]:
        """What the last word of a line of overrides may become, sorted."""
        return self._query(config_name=config_name, line=line)
