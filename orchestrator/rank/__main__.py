"""`python -m orchestrator.rank RUN --attempt N`: one rank as a process (`Request.rank_command`)."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.rank")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    arguments = parser.parse_args()

    from orchestrator.lifecycle.forks import leave
    from orchestrator.rank.entry import main_of

    leave(main_of(arguments.run)(arguments.run, arguments.attempt))


if __name__ == "__main__":
    main()
