"""End at once when a signal finds a rank waiting for one that has failed, under a scheduler.

A handler in Python has to wait until a collective returns, and this one never may. A byte in a pipe
comes through: a thread reads it and looks whether a failure was recorded.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from orchestrator.errors import EXIT_FAILED
from orchestrator.lifecycle.signs.node_watch import FAILED
from orchestrator.rundir.folder import RunDir

LOOK_S = 0.5


def heed_signals(run: RunDir, attempt: int, last_word: Callable[[str], None]) -> None:
    """From now on. `last_word` says how this rank ended."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def heed() -> None:
        os.read(heard, 1)
        while not any(run.attempt(attempt).glob("failure-*.json")):
            time.sleep(LOOK_S)
        print("ended with the rank that failed", flush=True)
        last_word(FAILED)
        os._exit(EXIT_FAILED)

    threading.Thread(target=heed, name="signals", daemon=True).start()
