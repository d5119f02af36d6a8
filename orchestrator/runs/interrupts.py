"""The launcher's one owner of signals: it counts them, and others decide what a count means."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from orchestrator.errors import Interrupted


class Interrupts:
    """Counts SIGINT and SIGTERM while it is entered; restores the old handlers after."""

    def __init__(self) -> None:
        self.count = 0
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def ending(self, tell: Callable[[str], None]) -> Callable[[str], None]:
        """`tell`, for what waits and says so: after an interrupt it raises `Interrupted`."""

        def tell_or_end(sentence: str) -> None:
            if self.count:
                raise Interrupted("interrupted")
            tell(sentence)

        return tell_or_end

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1


def counted(by: Interrupts | None) -> contextlib.AbstractContextManager[Interrupts]:
    """Count them for as long as this is entered, unless somebody does already."""
    return contextlib.nullcontext(by) if by is not None else Interrupts()
