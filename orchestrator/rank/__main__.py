"""`python -m orchestrator.rank RUN --attempt N`: one rank as a process (`Request.rank_command`)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.rank")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    arguments = parser.parse_args()

    from orchestrator.rank.entry import be_rank

    code = be_rank(arguments.run, arguments.attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    # A group of a lost peer would wait in its destructor for operations that can never end
    # (docs/architecture.md, at its end), so interpreter shutdown is skipped.
    os._exit(code)


if __name__ == "__main__":
    main()
