"""A composed configuration as plain values, and how it becomes a checked one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.compose.hydra.input import guarded
from orchestrator.config.reading import read_config, unknown_keys
from orchestrator.config.schema import Config
from orchestrator.config.user_code.program_section import is_program
from orchestrator.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Composed:
    """A composed configuration as plain values, not yet checked.

    Attributes:
        values: every interpolation resolved.
        overrides: that it was composed with, as typed.
        sweeps: whether a sweep is asked for, by -m or by the configuration itself.
        sweep_folder: where its points are gathered, unless `run.dir` says otherwise.
        point_folder: in it, this point's.
    """

    values: dict[str, Any]
    overrides: tuple[str, ...]
    sweeps: bool
    sweep_folder: Path
    point_folder: Path

    def config(self) -> Config:
        """Checked against the schema and the rules.

        Raises:
            ConfigError: unknown keys, wrong types, values that cannot be used.
        """
        if sentences := unknown_keys(self.values):
            raise ConfigError("\n".join(sentences))
        with guarded():
            return read_config(self.values)


def at_home(value: Any) -> Any:
    """`~/…` in a job's arguments, which are paths then, as the shell would have expanded it; a
    program's command has been the shell's already.
    """
    if isinstance(value, dict) and is_program(value):
        return {key: v if key == "command" else at_home(v) for key, v in value.items()}
    if isinstance(value, str):
        return str(Path(value).expanduser()) if value.startswith("~/") else value
    if isinstance(value, dict):
        return {key: at_home(inner) for key, inner in value.items()}
    return [at_home(inner) for inner in value] if isinstance(value, list) else value
