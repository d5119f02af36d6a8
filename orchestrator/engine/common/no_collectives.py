"""Silence between boundaries: while it is kept, a collective on our group is an error.

The engine keeps it from the start of a window to its boundary and lifts it only for its own
reduction. A job that has to talk in mid-window (synchronised batch norm, say) declares so.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from orchestrator.errors import SilenceError


class Silence:
    """Whether collectives are allowed now. One belongs to each group.

    The engine's own reductions start from gradient hooks, which may run on autograd's threads; so
    the exemption is per thread, and the rule is for all of them.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._exempt = threading.local()

    @property
    def kept(self) -> bool:
        """True while collectives are refused."""
        return self._reason is not None

    def keep(self, reason: str) -> None:
        """Refuse collectives from now on. `reason` is when: "in mid-window of update 3"."""
        self._reason = reason

    def end(self) -> None:
        """Allow collectives again."""
        self._reason = None

    @contextmanager
    def lifted(self) -> Generator[None]:
        """Allow this thread's collectives meanwhile: the engine's own."""
        before = getattr(self._exempt, "on", False)
        self._exempt.on = True
        try:
            yield
        finally:
            self._exempt.on = before

    def check(self, operation: str) -> None:
        """Raise `SilenceError` when `operation` may not run now."""
        if self._reason is not None and not getattr(self._exempt, "on", False):
            raise SilenceError(
                f"the collective '{operation}' was called {self._reason}; ranks talk only at the "
                "boundary. Move it there, or set `talks_in_window = True` in the job's class when "
                "every rank calls it equally often"
            )
