"""A search from its line, or from its folder, to its table and its exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.compose.command_line import CommandLine, check_overrides, key_of, literally
from orchestrator.compose.composer import Composer
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ConfigError,
    RunFolderError,
)
from orchestrator.report.tables.search_table import print_search
from orchestrator.report.terminal import command, say
from orchestrator.report.units import plural
from orchestrator.run_folder.files import make_folder, names_in
from orchestrator.run_folder.rundir import RunDir, read_json
from orchestrator.runs.console import Manner
from orchestrator.runs.resuming.elsewhere import standing_in
from orchestrator.runs.status import find_runs
from orchestrator.sweeps.folder import alone_in
from orchestrator.sweeps.search.asked import Asked, asked_of
from orchestrator.sweeps.search.drawing import distributions, refuse_without_optuna
from orchestrator.sweeps.todo import REPLACED

if TYPE_CHECKING:
    from orchestrator.sweeps.search.journal import Journal


def search(composer: Composer, manner: Manner) -> int:
    """Make trials until there are as many as asked for; print them; give the exit code: 0 once one
    trial has a value, whatever became of others.

    Raises:
        ConfigError: what cannot be searched, or not in this folder.
        RunFolderError: another command is at work in it, or it is damaged.
    """
    refuse_without_optuna()
    from orchestrator.sweeps.search.places import place_of
    from orchestrator.sweeps.search.searcher import Searcher

    asked = asked_of(composer)
    with alone_in(asked.folder):
        journal = journal_of(asked)
        with place_of(asked, manner) as place:
            searcher = Searcher(asked, journal, place, manner)
            searcher.run()
            interrupts, left = place.interrupts.count, len(place.left)
        print_search(searcher.table, manner.console)
        say(manner.console, f"the search's folder: {asked.folder}")
        states = [trial["state"] for trial in searcher.table["trials"]]
        if "open" in states or len(states) < asked.trials:
            if left:
                go = "goes on by itself" if left == 1 else "go on by themselves"
                end = f"to end {'it' if left == 1 else 'them'}: {command('cancel', asked.folder)}"
                say(manner.console, f"{plural(left, 'trial')} {go}; {end}", "bold")
            say(manner.console, f"to go on: {command('resume', asked.folder)}", "bold")
            return EXIT_INTERRUPTED if interrupts > 1 else EXIT_STOPPED
        return EXIT_FINISHED if "complete" in states else EXIT_FAILED


def journal_of(asked: Asked) -> Journal:
    """The search's own, found again or new. Raises `ConfigError` where the folder is another's."""
    from orchestrator.sweeps.search.journal import Journal

    folder = RunDir(asked.folder)
    if asked.sweep.force:
        _put_aside(folder)
    elif not folder.journal.exists() and find_runs(folder.path):
        raise ConfigError(
            f"{folder.path} holds runs that are no trials of a search; choose another run.dir, or "
            f"put them aside with --force"
        )
    journal = Journal(folder.journal, "maximize" if asked.maximize else "minimize")
    if journal.made_of is None:
        journal.made_of = asked.made_of
    if differing := [*_differing(journal.made_of or {}, asked.made_of)]:
        raise ConfigError(
            f"{folder.path} holds another search ({', '.join(differing)}); choose another run.dir, "
            f"or begin the search anew with --force"
        )
    journal.check(distributions(asked.space))
    if len(journal.trials) > asked.trials:
        raise ConfigError(
            f"{folder.path} holds {len(journal.trials)} trials already, more than "
            f"sweep.trials={asked.trials}; ask for at least as many"
        )
    return journal


def _differing(before: dict[str, Any], now: dict[str, Any]) -> Generator[str]:
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            yield f"{key.lstrip('+')} is not what it was"


def _put_aside(folder: RunDir) -> None:
    """All that an earlier search has left, where it can be looked at."""
    aside = folder.path / REPLACED
    if not aside.is_dir():
        make_folder(aside)
    number = sum(name.startswith("search-") for name in names_in(aside))
    place = aside / f"search-{number}"
    make_folder(place)
    runs = [path for path in find_runs(folder.path) if path.parent == folder.path]
    for path in (*runs, folder.search, folder.journal):  # the journal last: it says what they are
        with contextlib.suppress(FileNotFoundError):
            path.rename(place / path.name)


def resume_search(
    folder: Path, manner: Manner, overrides: Sequence[str] = (), config_dir: str | None = None
) -> int:
    """Go on with a search from its folder alone, as its line would.

    Args:
        overrides: in the place of the line's own of the same key.

    Raises:
        RunFolderError: the folder does not say its line.
        ConfigError: what makes it another search.
    """
    check_overrides(overrides)
    line: dict[str, Any] = (read_json(RunDir(folder).search) or {}).get("line") or {}
    if not line:
        raise RunFolderError(f"{RunDir(folder).search} does not say which line the search is of")
    keys = {key_of(override) for override in (*overrides, "run.dir=", "sweep.force=")}
    kept = [override for override in line["overrides"] if key_of(override) not in keys]
    asked = CommandLine(
        overrides=(*kept, *overrides, f"run.dir={literally(str(folder))}"),
        config_dir=config_dir or line["config_dir"],
        config_name=line["config_name"],
        multirun=True,
    )
    with standing_in(Path(line["folder"]), folder):
        composer = Composer(asked)
        composer.compose()
        return search(composer, manner)
