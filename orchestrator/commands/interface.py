"""What a command of `python -m orchestrator` is made of: of core, an add-on or another package.

@command("weigh RUN --json")
def weigh(run: Path, as_json: Json = False) -> None:
    '''Print how many parameters a run trains.'''
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

Function = TypeVar("Function", bound=Callable[..., Any])

# The options of a program without `--` before it are refused together with the program.
TAKES_PROGRAM: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}


def complete_overrides(incomplete: str) -> list[str]:
    """Return the overrides that a word may become, in a shell."""
    from orchestrator.commands.completion import complete_override, typed_words

    return complete_override(typed_words(os.environ), incomplete)


def complete_runs(incomplete: str) -> list[str]:
    """Return the run folders that a word may become, in a shell."""
    from orchestrator.commands.completion import complete_run

    return complete_run(incomplete)


def overrides_argument(text: str | None = None, *, metavar: str | None = None) -> Any:
    """Declare an argument of overrides, with `text` as its help; a shell completes them."""
    return typer.Argument(help=text, metavar=metavar, autocompletion=complete_overrides)


def run_argument(text: str) -> Any:
    """Declare an argument of run folders, with `text` as its help; a shell completes them."""
    return typer.Argument(help=text, autocompletion=complete_runs)


Json = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="More detail; tracebacks.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only errors.")]
AsForLaunch = Annotated[list[str] | None, overrides_argument("As for launch.")]
ConfigDir = Annotated[
    str | None, typer.Option("--config-dir", "-cd", help="Folder of your own configs.")
]
ConfigName = Annotated[
    str, typer.Option("--config-name", "-cn", help="Your own primary configuration in it.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSettings:
    """What the function of a command does not say by itself.

    Attributes:
        epilog: the end of its help.
        takes_program: words after `--` are no arguments of it, but `program_of(context)`.
        adds_verbose: it has the option `-v`, which shows tracebacks, without a parameter for it.
    """

    epilog: str | None = None
    takes_program: bool = False
    adds_verbose: bool = False


def command(
    example: str, *, takes_program: bool = False, adds_verbose: bool = True
) -> Callable[[Function], Function]:
    """Give a command's function an example for the end of its help, and say what it takes.

    A function that shows more with `-v` has a parameter `verbose: Verbose = False`.
    """
    settings = CommandSettings(
        epilog=f"As in: python -m orchestrator {example}",
        takes_program=takes_program,
        adds_verbose=adds_verbose,
    )

    def attach(function: Function) -> Function:
        vars(function)["command_settings"] = settings
        return function

    return attach


def settings_of(function: Callable[..., Any]) -> CommandSettings:
    """Return what `command` has given to a function; the defaults without."""
    return getattr(function, "command_settings", CommandSettings())


def program_of(context: typer.Context) -> list[str]:
    """Return `--` and the program after it on our command line; empty without."""
    return list(context.obj or ())


def options_of(context: typer.Context) -> list[str]:
    """Return the options of the verb that was typed, as they are typed."""
    return [name for option in context.command.params for name in option.opts if name[0] == "-"]
