"""What a command line asks for, as values; what only shows something; errors as messages."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from omegaconf import OmegaConf
from rich.console import Console

from orchestrator.config.command_line import CommandLine, read_command_line
from orchestrator.config.composer import Composer
from orchestrator.config.guard import check_arguments, no_such_key
from orchestrator.config.reading import to_yaml
from orchestrator.config.rules import refuse_without_sweep
from orchestrator.config.schema import Config
from orchestrator.errors import EXIT_FINISHED, ConfigError, OrchestratorError, plainly_said
from orchestrator.report.terminal import say, say_error
from orchestrator.runs.console import Manner

MOST_PLANS = 8  # of a sweep's points that are shown one by one, beside the table of all


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a command line asks for: a run, or a sweep; neither once it is answered.

    Attributes:
        exit_code: of what was answered.
    """

    manner: Manner
    config: Config | None = None
    overrides: tuple[str, ...] = ()
    sweep: Composer | None = None
    exit_code: int = EXIT_FINISHED


def read(arguments: Sequence[str]) -> Asked:
    """What the arguments ask for; what only shows something is done here. Raises our errors."""
    check_arguments(arguments)
    line = read_command_line(arguments)
    manner = Manner(console=Console(), verbose=line.verbose, quiet=line.quiet)
    composer = Composer(line)
    if line.cfg == "job":
        return Asked(manner=manner, exit_code=show_config(composer))
    if line.asks_hydra:
        from orchestrator.config.composer import answer

        return Asked(manner=manner, exit_code=answer(composer))
    found = composer.compose()
    if found.sweeps:
        return Asked(manner=manner, sweep=composer)
    config = found.config()
    refuse_without_sweep(config)
    return Asked(manner=manner, config=config, overrides=found.overrides)


def show_config(composer: Composer) -> int:
    """Print what config.yaml of the run would say, or the part of it that --package names."""
    text = to_yaml(composer.compose().config())
    package = composer.line.package
    if package is not None:
        part = OmegaConf.select(OmegaConf.create(text), package)
        if part is None:
            raise ConfigError(no_such_key(package))
        text = OmegaConf.to_yaml(part) if OmegaConf.is_config(part) else f"{part}\n"
    sys.stdout.write(text)
    return EXIT_FINISHED


def show_plan(line: CommandLine, console: Console, *, as_json: bool) -> None:
    """Print who would compute what: of a run, or of each point of a sweep, as a launch would have
    it. Raises `UsageError` as that does.
    """
    composer = Composer(line)
    found = composer.compose()
    if not found.sweeps:
        _show_plan_of_one(found.config(), console, as_json=as_json)
        return
    from orchestrator.sweep.tables import cells_and_plans, foretold, print_cells, row_of

    made = cells_and_plans(composer)
    sentences = foretold([cell for cell, _ in made])
    if as_json:
        _print_json([
            {"overrides": list(cell.point.overrides), "cell": row_of(cell), **plan}
            for cell, plan in made
        ])  # fmt: skip
        for sentence in sentences:
            say(Console(stderr=True), f"warning: {sentence}", "yellow")
        return
    for cell, plan in made if len(made) <= MOST_PLANS else ():
        say(console, cell.point.words, "bold")
        _print_plan(plan, console)
    print_cells([cell for cell, _ in made], console)
    for sentence in sentences:
        say(console, sentence, "yellow", prose=True)


def _show_plan_of_one(config: Config, console: Console, *, as_json: bool) -> None:
    from orchestrator.runs.foreseen import describe, plan_and_notes

    refuse_without_sweep(config)
    made = plan_and_notes(config)
    request, said = describe(config)
    if as_json:
        _print_json({**made, **({"request": {**request.details, **said}} if said else {})})
        return
    _print_plan(made, console)
    if said:
        sys.stdout.write(f"\n{request.text}\n")
        refused = said["refused"]
        say(console, f"the scheduler would say: {said['scheduler']}", "red" if refused else "")
        if said["warning"]:
            say(console, f"warning: {said['warning']}", "yellow", prose=True)


def _print_plan(plan: dict[str, Any], console: Console) -> None:
    from orchestrator.report.run_tables import print_plan

    print_plan(plan, console)
    for sentence in plan["notes"]:
        say(console, sentence, "dim", prose=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


class Messages:
    """Errors of what is done inside become one message, and `exit_code`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._verbose = any(a in {"-v", "--verbose"} for a in arguments)
        self.exit_code = EXIT_FINISHED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, OrchestratorError):
            return False
        if self._verbose and not plainly_said(error):
            traceback.print_exception(error)  # the sentence and the exit code stay as they are
        say_error(error, Console(stderr=True))
        self.exit_code = error.exit_code
        return True
