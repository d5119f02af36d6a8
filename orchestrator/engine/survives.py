"""What an engine has beside `Engine`, so that a run can go on in a smaller or larger group."""

from __future__ import annotations

from typing import Any, Protocol

from orchestrator.engine.api import Group

BREAKABLE = ("gloo", "threads")
"""Transports whose collectives can be left when a peer is gone."""


def against(job: Any, group: Group) -> str:
    """Why the ranks of `group` cannot go on without those that are lost; "" where they can."""
    if group.size > 1 and group.transport not in BREAKABLE:
        return (
            f"run.survive=true needs transport=gloo: a collective of {group.transport} cannot "
            "be left when a peer is gone; leave run.survive out, and use run.max_restarts"
        )
    if getattr(job, "talks_in_window", False):
        return (
            f"run.survive=true is not available for {type(job).__name__}, whose loss calls "
            "collectives of its own (talks_in_window): nobody could break them off"
        )
    return ""


class Survives(Protocol):
    """An engine whose group may lose ranks, and get others (docs/explanation/surviving.md)."""

    def newcomers_wait(self, waiting: bool) -> None:  # it is all that is said
        """Whether the next boundary is to tell all ranks that newcomers wait. Not collective."""
        ...

    def before_growth(self) -> None:
        """Keep on every rank what newcomers cannot help to put together. Collective, between
        windows, over the group that newcomers are not in yet.
        """
        ...

    def catch_up(self, group: Group, updates: int, standing: str) -> str | None:
        """See that all of `group` stand after the same update. Collective, over the new group.

        Some may have ended an update that others have not; newcomers have ended none. These get the
        state of the lowest rank that has; a window under way is forgotten.

        Args:
            updates: how many this rank has applied; 0 of a newcomer.
            standing: what this rank knows of them, for those that have applied fewer.

        Returns:
            None; on a rank that was behind the `standing` of the rank whose state it has now.

        Raises:
            StateLost: on all alike; a part of the state is gone. They go on after `regroup` and
                `load_state`.
        """
        ...

    def regroup(self, group: Group) -> None:
        """Go on in `group`, before a window. Collective; all of its ranks stand alike."""
        ...
