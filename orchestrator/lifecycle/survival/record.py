"""The record of generations: files in the attempt's folder, each of which comes into being once.

`link` either makes the name, with all its content, or finds that somebody else's is there. That is
all of the consensus: whoever comes second obeys. It holds on NFS, too (unlike O_EXCL of old).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.run_folder.rundir import read_json, write_atomically
from orchestrator.run_folder.seal import sealed_json

Lost = TypeVar("Lost")


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
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, generation: int) -> Path:
        return self._folder / f"generation-{generation:04d}.json"

    def publish(self, generation: int, members: Iterable[int], **more: Any) -> dict[str, Any]:
        """Propose `members`; give what counts, this proposal or the one that came first."""
        path = self.path(generation)
        content = {"generation": generation, "members": list(members), **more}
        own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        write_atomically(own, sealed_json(path.name, content))
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

    def read(self, generation: int) -> dict[str, Any] | None:
        """The record of a generation; None before there is one."""
        return read_json(self.path(generation))

    @property
    def begun(self) -> bool:
        """Whether the ranks train, and go on without one that is gone from now on."""
        return self.path(0).exists()

    def gone(self, generation: int) -> list[int]:
        """The ranks that this generation went on without, of those of the one before it."""
        return (self.read(generation) or {}).get("gone", [])

    def losses(self) -> list[list[int]]:
        """The ranks that each generation went on without, oldest first."""
        return [self.gone(number) for number in range(1, self.newest() + 1)]

    def newest(self) -> int:
        """The number of the newest generation; 0 where nobody was lost."""
        number = 0
        while self.path(number + 1).exists():
            number += 1
        return number
