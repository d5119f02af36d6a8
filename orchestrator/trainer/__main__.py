"""One worker as a process: `python -m orchestrator.trainer RUN --attempt N`."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.trainer")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    arguments = parser.parse_args()

    from orchestrator.lifecycle.forks import leave
    from orchestrator.trainer.entry import main_of

    leave(main_of(arguments.run)(arguments.run, arguments.attempt))


if __name__ == "__main__":
    main()
