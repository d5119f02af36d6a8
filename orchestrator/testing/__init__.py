"""Test suites for a third party's cluster, transport or tracker, to subclass with pytest.

Each is a class of tests that needs one fixture of yours, and each runs the real code: ranks are
processes, and their reports are read back from the run's folder. See docs/how-to/extending.md. A
suite is imported when it is first used: only that of transports needs torch here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.testing.clusters import ClusterSuite
    from orchestrator.testing.trackers import TrackerSuite
    from orchestrator.testing.transports import TransportSuite

__all__ = ["ClusterSuite", "TrackerSuite", "TransportSuite"]
_HOMES = {"ClusterSuite": "clusters", "TrackerSuite": "trackers", "TransportSuite": "transports"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
