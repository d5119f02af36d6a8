"""Tensors that gloo's own threads still hold when a collective is over, kept until they let go.

gloo frees a collective's tensors a moment after it says that the collective is done. When Python
has dropped them by then, that thread needs Python's lock to free them; and when the interpreter is
being shut down meanwhile, it cannot get it and the process aborts ("terminate called without an
active exception"), with all work done. A tensor which Python holds longer is freed without the
lock, so the last ones are kept here, and the shut-down waits for the threads.

The count of holders alone does not say that a thread has let go: newer versions of torch lower it
first, and then take the lock to lower Python's own count, which had been raised meanwhile (see
"PyObject preservation" in torch's c10/util/intrusive_ptr.h). Only both counts together do.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterable
from typing import Any

from torch import Tensor

_PATIENCE_S = 30.0  # what is kept is done: its thread only has to get a processor
_LOOK_EVERY_S = 0.001
_OURS = 3  # Python's count of a tensor in use by nobody else: the list, `t`, and the argument


class Held:
    """Tensors that somebody beside Python may hold."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep these until they are held by nobody else; drop earlier ones that are not.

        Args:
            tensors: views that nobody else in Python will have when this has returned.
        """
        self._tensors = [*_in_use(self._tensors), *tensors]

    def wait(self) -> None:
        """Return when nobody else holds any, or after half a minute."""
        until = time.monotonic() + _PATIENCE_S
        while self._tensors and time.monotonic() < until:
            self._tensors = _in_use(self._tensors)
            if self._tensors:
                time.sleep(_LOOK_EVERY_S)


def _in_use(tensors: list[Tensor]) -> list[Tensor]:
    """Those that somebody beside this one list holds."""
    return [t for t in tensors if _holders(t) > 1 or sys.getrefcount(t) > _OURS]


def _holders(tensor: Any) -> int:
    return tensor._use_count()  # noqa: SLF001  # no public name


BY_GLOO = Held()
atexit.register(BY_GLOO.wait)
