"""Ctrl-C before a command has anything to clean up: it ends at once, without a traceback.

Imports next to nothing: commands install the handler before their own slow imports.
"""

from __future__ import annotations

import os
import signal


def leave(*_: object) -> None:
    """End at once: before a run folder exists (see `Interrupts`) nothing needs cleaning up.

    This avoids KeyboardInterrupt, which libraries turn into errors of their own.
    """
    os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)


def leave_at_interrupt() -> None:
    """Make Ctrl-C end this process by `leave`, unless SIGINT is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def raise_at_interrupt() -> None:
    """Undo `leave_at_interrupt`: Ctrl-C raises `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
