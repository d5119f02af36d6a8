"""`python -m orchestrator.launch [-v|-q] [-m] OVERRIDES`: start a run, or a sweep of runs.

Only the signals are seen to here, before anything slow is imported; `application` does the work.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from orchestrator.errors import EXIT_INTERRUPTED


def _leave(*_: object) -> None:
    """End at once: before a run folder exists (see `runs.interrupts`) nothing needs cleaning up.

    Not left to KeyboardInterrupt, which libraries turn into errors of their own.
    """
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code.

    Args:
        arguments: in place of the process's own.
    """
    signal.signal(signal.SIGINT, _leave)
    from orchestrator.cli import application

    return application.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
