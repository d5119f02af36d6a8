"""`python -m benchmarks [--quick] [NAME …]`: run all measurements, or the named ones."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time

from benchmarks import pages
from benchmarks.measure import RESULTS, kept

MEASUREMENTS = (
    "submission",
    "programs",
    "sweeps",
    "peers",
    "pairs",
    "lengths",
    "reproducible",
    "boundary",
    "overhead",
    "sharded",
    "pipeline",
    "checkpoints",
    "survive",
    "scale",
    "mindspore_start",
    "mindspore_steps",
    "mindspore_reduction",
)

# Only when asked for: chaos takes half an hour and breaks a cluster of its own, load needs strace.
BY_NAME = ("chaos", "load")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", choices=[*MEASUREMENTS, *BY_NAME, "tables", []]
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, ranks and steps")
    parser.add_argument("--seed", type=int, default=0, help="chaos: which faults, and when")
    parser.add_argument("--faults", type=int, default=40, help="chaos: how many runs to disturb")
    given = parser.parse_args()
    if given.names == ["tables"]:  # pages, plots and figures in documents, from results
        from benchmarks import plots  # Matplotlib, which nothing else needs

        pages.write()
        plots.write()
        return
    if given.names == ["chaos"]:
        _one("chaos", quick=given.quick, seed=given.seed, faults=given.faults)
        return
    if len(given.names) == 1:
        _one(given.names[0], quick=given.quick)
        return
    failed: list[str] = []
    for name in given.names or [*MEASUREMENTS, "tables"]:  # in processes of their own
        print(f"== {name}", flush=True)
        began = time.monotonic()
        more = ["--quick"] if given.quick else []
        done = subprocess.run([sys.executable, "-m", "benchmarks", name, *more], check=False)
        print(f"-- {name}: {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _one(name: str, *, quick: bool, **more: int) -> None:
    result = RESULTS / f"{name}.json"
    try:
        importlib.import_module(f"benchmarks.{name}").main(quick=quick, **more)
    finally:  # `chaos` ends with what was not as it should be, and has its page too
        if result.exists():
            text = pages.page(name, kept(name))
            result.with_suffix(".md").write_text(text, encoding="utf-8")
            print(text)


if __name__ == "__main__":
    main()
