"""`python -m orchestrator.launch [-v|-q] [-m] OVERRIDES`: start a run, or a sweep of runs.

Signals are handled before anything slow is imported.
"""

from __future__ import annotations

from orchestrator.interrupt import STOP_REQUEST, leave, leave_at_interrupt

if __name__ == "__main__":
    leave_at_interrupt()

import signal
import sys
from collections.abc import Sequence

from orchestrator.errors import (
    EXIT_FINISHED,
    ConfigError,
    OrchestratorError,
    require_cwd,
)


def run_app(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit code. Raise the errors of this package."""
    from rich.console import Console

    from orchestrator.config.command_line import read_command_line
    from orchestrator.config.composer import Composer, print_help
    from orchestrator.runs.follow import OutputOptions, start_run

    line = read_command_line(arguments)
    output = OutputOptions(console=Console(), verbose=line.verbose, quiet=line.quiet)
    if not (line.overrides or line.flags or line.help or line.cfg):
        raise ConfigError(
            "nothing says what to train: the digits of the example are job=digits, a class of "
            "yours is job._target_=my_job.Line, and a program comes after --, as in -- train.py"
        )
    composer = Composer(line)
    if line.cfg == "job":
        from orchestrator.config.reading import to_yaml

        sys.stdout.write(to_yaml(composer.compose().config()))
        return EXIT_FINISHED
    if line.help:
        print_help(composer)
        return EXIT_FINISHED
    composition = composer.compose()
    if composition.sweeps:
        from orchestrator.sweep.sweep import run_sweep

        return run_sweep(composer, output)
    config = composition.config()
    if line.changed or "sweep.force=true" in composition.overrides:
        option = "--changed" if line.changed else "sweep.force=true"
        raise ConfigError(f"{option} is for sweeps, so it needs -m; a new run has no old results")
    from orchestrator.runs.start import prepared_run

    with prepared_run(
        config, output, overrides=composition.overrides, flags=composition.flags
    ) as ready:
        return start_run(ready)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Errors become one message.

    Args:
        arguments: in place of the process's own.
    """
    numbers = (signal.SIGINT, STOP_REQUEST)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        from orchestrator.report.terminal import exit_on_broken_pipe, print_error

        argv = list(sys.argv[1:] if arguments is None else arguments)
        try:
            require_cwd()
            with exit_on_broken_pipe():
                return run_app(argv)
        except (OrchestratorError, OSError) as error:
            return print_error(error, verbose=not {"-v", "--verbose"}.isdisjoint(argv))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)  # the caller of this continues


if __name__ == "__main__":
    sys.exit(main())
