"""The group of the next generation: formed aside, so that it can be left where somebody dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from orchestrator.engine.api import Framework, GroupSpec
from orchestrator.errors import PeerLost

LOOK_S = 0.005


def formed(framework: Framework, spec: GroupSpec, given_up: Callable[[], bool]) -> Any:
    """The group, from a thread that is left behind where one more of its members dies: what it
    waits for has no end then.

    Raises:
        PeerLost: it was `given_up` meanwhile.
    """
    found: list[Any] = []

    def form() -> None:
        try:
            found.append(framework.form_group(spec))
        except Exception as error:  # noqa: BLE001  # raised again by who waits
            found.append(error)

    thread = threading.Thread(target=form, name="forming", daemon=True)
    thread.start()
    while not found:
        thread.join(LOOK_S)
        if not found and given_up():
            raise PeerLost("one more rank is gone")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
