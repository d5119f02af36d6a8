"""What a third party's cluster, transport or tracker has to do: suites, to subclass with pytest.

Each is a class of tests that asks for one fixture of yours, and each ends in the real code: ranks
are processes, and what they say is read back from the run's folder. See docs/extending.md.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"ClusterSuite": "clusters"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
