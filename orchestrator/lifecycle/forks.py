"""Forks: what nodes and ranks of this machine are, and who holds a point of a sweep."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from orchestrator.lifecycle.prctl import die_with


def fork(be: Callable[[], int]) -> int:
    """Start a child in a session of its own that dies with this process; give its pid.

    Args:
        be: all that the child does; gives its exit status, which is 1 when this raises.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        os.setsid()
        code = be()
    except BaseException:  # noqa: BLE001  # a child must not live on as a second parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # A group of a lost peer would wait in its destructor for operations that can never end
        # (docs/architecture.md, at its end), so interpreter shutdown is skipped.
        os._exit(code)
