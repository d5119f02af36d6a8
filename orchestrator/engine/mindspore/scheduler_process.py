"""The scheduler's own program: `python scheduler_process.py PARENT_PID`, with MS_ROLE=MS_SCHED set.

Run as a file, so that nothing but MindSpore has to be imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    # A stop is for the ranks; the scheduler has to outlive their last collective.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
    from mindspore.communication import init

    init()


if __name__ == "__main__":
    main()
