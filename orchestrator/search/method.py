"""The methods of `sweep.search` that Optuna provides."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.composer import Composer
from orchestrator.errors import ConfigError
from orchestrator.runs.follow import OutputOptions
from orchestrator.sweep.api import SearchMethod


def require_optuna() -> None:
    """Raise `ConfigError` if optuna is missing."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("a search needs optuna, which is not installed; pip install 'optuna>=4'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)


class OptunaSearch(SearchMethod):
    """Trials that a sampler of Optuna chooses: `tpe`, `random`, or each combination: `grid`."""

    def run(self, composer: Composer, output: OutputOptions) -> int:
        require_optuna()
        from orchestrator.search.search import run_search

        return run_search(composer, output)

    def resume(
        self,
        folder: Path,
        output: OutputOptions,
        overrides: Sequence[str] = (),
        config_dir: str | None = None,
    ) -> int:
        require_optuna()
        from orchestrator.search.search import resume_search

        return resume_search(folder, output, overrides, config_dir)
