"""`python -m benchmarks [NAME …]`: run all measurements, or the named ones."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

NO_MEASUREMENT = ("__main__", "measure", "link", "contenders", "rank")


def main() -> None:
    found = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])]
    names = sys.argv[1:] or [name for name in found if name not in NO_MEASUREMENT]
    for name in names:
        if name not in found:
            sys.exit(f"there is no measurement '{name}'; there are: {', '.join(found)}")
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
