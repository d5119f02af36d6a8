"""The interface of a search: how points of a sweep are chosen from the results of earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.composer import Composer
from orchestrator.runs.follow import OutputOptions


class SearchMethod(ABC):
    """A method of `sweep.search`. It writes `search.json`, whose key "search" is its name there."""

    @abstractmethod
    def run(self, composer: Composer, output: OutputOptions) -> int:
        """Run trials until there are as many as the line asks for; return the exit code: 0 once one
        trial has a value, whatever became of others.

        Raises:
            ConfigError: what cannot be searched, or not in this folder.
            RunFolderError: another command is at work in it, or it is damaged.
        """

    @abstractmethod
    def resume(
        self,
        folder: Path,
        output: OutputOptions,
        overrides: Sequence[str] = (),
        config_dir: str | None = None,
    ) -> int:
        """Continue a search from its folder alone, as its line would; return the exit code.

        Args:
            overrides: replace the line's own of the same key.

        Raises:
            RunFolderError: the folder does not say its line.
            ConfigError: overrides that make it another search.
        """
