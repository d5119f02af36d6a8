"""Shared by all measurements: interleaved repetitions, medians with quartiles, the result file.

A result is a JSON file in `results/`; pages, plots and the figures in README and docs are made from
it (`pages.py`, `plots.py`), never typed.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from math import gcd
from pathlib import Path
from typing import Any

from slurm.polling import first_true

RESULTS = Path(__file__).parent / "results"
TINY_PLAN = (
    "job._target_=tests.tiny_job.Tiny",
    "tracker=none",
    "accumulation.global_batch=32",
    "accumulation.steps=4",
    "cluster.nodes=2",
)
"""A job with next to no work of its own, on two nodes: what is measured is around it."""
_VERSIONS = ("torch", "mindspore", "accelerate", "lightning-fabric", "submitit", "hydra-core")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and extremes of `count` repetitions."""

    median: float
    q1: float
    q3: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Return the spread of one figure or more.

        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]).median
        3.0
        """
        many = list(figures) * 2 if len(figures) == 1 else figures
        q1, median, q3 = statistics.quantiles(many, n=4, method="inclusive")
        return cls(
            median=median, q1=q1, q3=q3, low=min(figures), high=max(figures), count=len(figures)
        )

    def rounded(self, digits: int = 4) -> dict[str, float | int]:
        """Round for JSON to the significant digits."""
        return {
            key: value if key == "count" else float(f"{value:.{digits}g}")
            for key, value in asdict(self).items()
        }


def turns(names: Sequence[str], repetitions: int) -> list[list[str]]:
    """Return the order of contenders: each once a round, each round beginning with another.

    The stride changes too, so that each contender follows different ones.

    >>> turns(["a", "b", "c"], 3)
    [['a', 'b', 'c'], ['b', 'a', 'c'], ['c', 'a', 'b']]
    """
    count = len(names)
    strides = [stride for stride in range(1, count + 1) if gcd(stride, count) == 1]
    return [
        [names[(turn + index * strides[turn % len(strides)]) % count] for index in range(count)]
        for turn in range(repetitions)
    ]


def interleaved(
    contenders: Mapping[str, Callable[[], float]], repetitions: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Call the contenders in turn, so that a drifting machine hits all alike. Without warm-up."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number, turn in enumerate(turns(list(contenders), warm_up + repetitions)):
        for name in turn:
            figure = contenders[name]()
            if number >= warm_up:
                figures[name].append(figure)
    return figures


def ratios(figures: Mapping[str, Sequence[float]], reference: str) -> dict[str, list[float]]:
    """Return each contender's ratio to the reference in the same repetition: drift cancels out."""
    base = figures[reference]
    return {
        name: [one / other for one, other in zip(found, base, strict=True)]
        for name, found in figures.items()
    }


def rows_of(figures: Mapping[str, Sequence[float]], reference: str) -> list[dict[str, Any]]:
    """Return rows for JSON: name, spread, and spread of the ratios to the reference."""
    relative = ratios(figures, reference)
    return [
        {
            "name": name,
            "spread": Spread.of(found).rounded(),
            "ratio": Spread.of(relative[name]).rounded(),
        }
        for name, found in figures.items()
    ]


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = 150.0) -> Any:
    """Return the first true value. Raises `TimeoutError` when there is none in time."""
    if value := first_true(condition, seconds=patience_s):
        return value
    raise TimeoutError(f"{what} did not come within {patience_s:g} s")


def machine() -> dict[str, Any]:
    """Describe the machine, and its load."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = named[0] if named else model
    versions = {"python": platform.python_version()}
    for package in _VERSIONS:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "versions": versions,
    }


def keep(name: str, data: Mapping[str, Any], *, quick: bool) -> None:
    """Write `results/<name>.json`; `quick` is noted with its figures."""
    RESULTS.mkdir(exist_ok=True)
    whole = {"quick": quick, **data}
    text = json.dumps(whole, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def kept(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Read a result back. Raises `FileNotFoundError` if it was not measured."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
