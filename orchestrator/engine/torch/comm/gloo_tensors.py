"""Tensors that gloo's own threads still hold when a collective is over, kept until they let go.

gloo frees a collective's tensors a moment after it says that the collective is done. When Python
has dropped them by then, that thread needs Python's lock to free them; and when the interpreter is
being shut down meanwhile, it cannot get it and the process aborts ("terminate called without an
active exception"), with all work done. A tensor which Python holds longer is freed without the
lock, so the last ones are kept here, and the shut-down waits for the threads.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable
from typing import Any

from torch import Tensor

_PATIENCE_S = 30.0  # what is kept is done: its thread only has to get a processor
_LOOK_EVERY_S = 0.001


class Held:
    """Tensors that somebody beside Python may hold."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep these until they are held by nobody else; drop earlier ones that are not."""
        self._tensors = [t for t in (*self._tensors, *tensors) if _holders(t) > 1]

    def wait(self) -> None:
        """Return when nobody else holds any, or after half a minute."""
        until = time.monotonic() + _PATIENCE_S
        while self._tensors and time.monotonic() < until:
            self.keep(())
            if self._tensors:
                time.sleep(_LOOK_EVERY_S)


def _holders(tensor: Any) -> int:
    return tensor._use_count()  # noqa: SLF001  # no public name


BY_GLOO = Held()
atexit.register(BY_GLOO.wait)
