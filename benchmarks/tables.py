"""`python -m benchmarks tables`: pages, plots, and the figures in README and docs, from results."""

from __future__ import annotations

from benchmarks import pages, plots


def main(*, quick: bool = False) -> None:
    del quick  # nothing is measured
    pages.write()
    plots.write()
