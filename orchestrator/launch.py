"""`python -m orchestrator.launch [-v|-q] [-m] OVERRIDES`: start a run, or a sweep of runs.

The signals are seen to before anything slow is imported. `cli.application` says what was asked for,
`runs.start` makes it ready and gives what places it; that is called here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from orchestrator.errors import EXIT_INTERRUPTED, standing_somewhere


def _leave(*_: object) -> None:
    """End at once: before a run folder exists (see `runs.interrupts`) nothing needs cleaning up.

    Not left to KeyboardInterrupt, which libraries turn into errors of their own.
    """
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def run_app(arguments: Sequence[str]) -> int:
    """Do what the arguments say; give the exit code. Raises our errors."""
    from orchestrator.cli.application import read

    asked = read(arguments)
    if asked.sweep is not None:
        from orchestrator.sweep.sweep import run_sweep

        return run_sweep(asked.sweep, asked.manner)
    if asked.config is None:
        return asked.exit_code
    from orchestrator.cli.start import begun, way_of

    with begun(asked.config, asked.manner, overrides=asked.overrides) as ready:
        place = way_of(ready.cluster)
        return place(ready).exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code. Errors become one message.

    Args:
        arguments: in place of the process's own.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from orchestrator.cli.application import Messages
        from orchestrator.report.terminal import while_somebody_reads

        given = list(sys.argv[1:] if arguments is None else arguments)
        with Messages(given) as messages:
            standing_somewhere()
            with while_somebody_reads():
                return run_app(given)
    finally:
        signal.signal(signal.SIGINT, before)  # whoever called this goes on
    return messages.exit_code


if __name__ == "__main__":
    sys.exit(main())
