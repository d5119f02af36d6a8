"""What is recorded of changes of the group: who is gone, and who has come.

A note goes with the line of the next update. Where the group changes again before that line is
written, or who was to write it is gone as well, the next writer's line has all that no line has
yet: nobody's end is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

Notes = dict[str, Any]
WHO = {"survived": "gone", "joined": "came"}
"""The notes that there are, and who is named in each."""
AT_THE_END = {"redone": 0}
"""Of who went away after the last update."""


def notes_of(
    gone: Sequence[int],
    came: Sequence[int],
    facts: Notes,
    lost_updates: int | None,
    *,
    redone: bool = True,
) -> Notes:
    """Of one change.

    Args:
        gone, came: ranks.
        facts: of the new group.
        lost_updates: that a lost part of the state takes back; None: no part is lost.
        redone: an update was under way, and is begun again.
    """
    found: Notes = {}
    if came:
        found["joined"] = {**facts, "came": list(came)}
    if gone:
        back = {} if lost_updates is None else {"lost_updates": lost_updates}
        found["survived"] = {**facts, "gone": list(gone), **back, **({} if redone else AT_THE_END)}
    return found


def merged(earlier: Notes, later: Notes) -> Notes:
    """Both as one, with the facts of the later group.

    >>> first = {"survived": {"generation": 1, "ranks": 3, "gone": [2], "seconds": 0.5}}
    >>> merged(first, {"survived": {"generation": 2, "ranks": 2, "gone": [0], "seconds": 0.25}})
    {'survived': {'generation': 2, 'ranks': 2, 'gone': [2, 0], 'seconds': 0.75}}
    """
    one = {key: earlier[key] for key in WHO if key in earlier} | later
    for key, who in WHO.items():
        if key in earlier and key in later:
            before, after = earlier[key], later[key]
            seconds = round(before["seconds"] + after["seconds"], 3)
            one[key] = {**after, who: [*before[who], *after[who]], "seconds": seconds}
            if "redone" not in before:
                one[key].pop("redone", None)
            if "lost_updates" in before:
                lost = before["lost_updates"] + after.get("lost_updates", 0)
                one[key]["lost_updates"] = lost
    return one


def unrecorded(history: Iterable[Notes], lines: Iterable[Notes]) -> Notes:
    """What a rank knows of changes and no line has, as one."""
    newest = max(map(_generation, lines), default=0)
    return reduce(merged, (notes for notes in history if _generation(notes) > newest), {})


def _generation(notes: Notes) -> int:
    return max((notes[key]["generation"] for key in WHO if key in notes), default=0)
