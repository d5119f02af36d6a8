"""What people are told of ranks that went away while the others go on."""

from __future__ import annotations

from collections.abc import Sequence


def went_away(gone: Sequence[int], update: int, *, over: bool) -> str:
    """Who, and when.

    >>> went_away([3], 12, over=False), went_away([0, 1], 41, over=True)
    ('rank 3 went away in update 12; ', 'ranks 0, 1 went away after the last update, 40; ')
    """
    when = f"after the last update, {update - 1}" if over else f"in update {update}"
    return f"{ranks(gone)} went away {when}; "


def those_left(count: int, *, over: bool) -> str:
    """What they do: redo the update, or, where none was under way, end the run.

    >>> those_left(5, over=False), those_left(1, over=True)
    ('5 ranks redo it and go on', '1 rank ends the run')
    """
    if over:
        return f"{count} ranks end the run" if count > 1 else "1 rank ends the run"
    return f"{count} ranks redo it and go on" if count > 1 else "1 rank redoes it, alone"


def ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
