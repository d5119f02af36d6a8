"""The record of generations: files in the attempt's folder, each of which comes into being once.

| in a file | what |
|---|---|
| `generation`, `members` | its number, who is in it, in their order (`members.py`) |
| `gone`, `joined` | who is not in it any more; newcomers |
| `updates` | of one with newcomers: that were done when they came |
| `code` | in the first one: the ranks' own modules (`trainer/survival.py`) |

`link` either makes the name, with all its content, or finds that somebody else's is there. That is
all of the consensus: whoever comes second obeys. It holds on NFS, too (unlike O_EXCL of old).
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.rundir.checksums import to_json_text
from orchestrator.rundir.files import read_json, write_atomically

Lost = TypeVar("Lost")
ROOM = bytes(4096)
"""More than a generation needs that came after the first."""


def to_blame(
    ends: Iterable[Lost], ranks: Callable[[Lost], Iterable[int]], losses: Sequence[Iterable[int]]
) -> list[Lost]:
    """Of the losses of an attempt those that its own end can be due to: those that nobody survived;
    where all were, the last that were. One that others went on without, and then without others,
    is never to blame.

    Args:
        ranks: that an end is of: one, or those of a node.
        losses: see `GenerationRecord.losses`.

    >>> to_blame([5, 3, 4], lambda rank: [rank], [[5], [3]])
    [4]
    >>> to_blame([5, 3], lambda rank: [rank], [[5], [3]]), to_blame([5], lambda r: [r], [[5], [3]])
    ([3], [])
    """
    of = [(end, set(ranks(end))) for end in ends]
    survived = {rank for gone in losses for rank in gone}
    last = set(losses[-1]) if losses else set[int]()
    alone = [end for end, ranks in of if not ranks <= survived]
    return alone or [end for end, ranks in of if ranks & last]


class GenerationRecord:
    """Who belongs to each generation of an attempt.

    Args:
        folder: the attempt's, which every rank sees.

    Attributes:
        no_room: why the newest attempt of this process to write failed, if it did: a full disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.no_room: OSError | None = None

    def path(self, generation: int) -> Path:
        return self._folder / f"generation-{generation:04d}.json"

    def publish(self, generation: int, members: Iterable[int], **more: Any) -> dict[str, Any]:
        """Propose `members`; give what counts, this proposal or the one that came first.

        Raises:
            OSError: it cannot be written, which may be tried again.
        """
        path = self.path(generation)
        content = {"generation": generation, "members": list(members), **more}
        own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        self._write(own, to_json_text(path.name, content))
        try:
            os.link(own, path)
        except FileExistsError:
            found = self.read(generation)
            if found is None:
                raise
            return found
        finally:
            own.unlink(missing_ok=True)
        return content

    def proposed(self, generation: int, members: Iterable[int], **more: Any) -> Any | None:
        """`publish`; None where it cannot be written now (`no_room`)."""
        try:
            return self.publish(generation, members, **more)
        except OSError:
            return None

    def has_room(self) -> bool:
        """Whether a generation could be written now; nothing else tells where a quota is."""
        own = self._folder / f".room.{secrets.token_hex(8)}"
        try:
            self._write(own, ROOM)
        except OSError:
            return False
        own.unlink()
        return True

    def _write(self, path: Path, content: str | bytes) -> None:
        self.no_room = None
        try:
            write_atomically(path, content)
        except OSError as error:
            self.no_room = error
            raise

    def read(self, generation: int) -> dict[str, Any] | None:
        """The record of a generation; None before there is one."""
        return read_json(self.path(generation))

    @property
    def begun(self) -> bool:
        """Whether the ranks train, and go on without one that is gone from now on."""
        return self.path(0).exists()

    def since(self, generation: int = 1) -> Iterator[dict[str, Any]]:
        """All generations from this one on that there are, in order."""
        while (found := self.read(generation)) is not None:
            yield found
            generation += 1

    def losses(self) -> list[list[int]]:
        """The members that generations went on without, of those of the one before it: of each
        generation that lost some, the oldest first.
        """
        return [found["gone"] for found in self.since() if found.get("gone")]

    def newest(self) -> dict[str, Any] | None:
        """The newest generation; None before the first."""
        return next(iter(deque(self.since(0), maxlen=1)), None)
