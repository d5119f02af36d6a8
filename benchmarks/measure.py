"""What benchmarks share: interleaved repetitions, medians, a Markdown table, a JSON file."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender's figure: median, smallest and largest over the repetitions."""

    name: str
    median: float
    low: float
    high: float


def interleaved(
    contenders: Mapping[str, Callable[[], float]], repetitions: int, warm_up: int = 1
) -> list[Measured]:
    """Call the contenders in turn, A B A B …, so that a drifting machine hits all alike."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(warm_up + repetitions):
        for name, contender in contenders.items():
            figure = contender()
            if repetition >= warm_up:
                figures[name].append(figure)
    return [
        Measured(name=name, median=statistics.median(f), low=min(f), high=max(f))
        for name, f in figures.items()
    ]


def table(measured: Sequence[Measured], unit: str, reference: str) -> str:
    """A Markdown table with ratios to the contender called `reference`."""
    base = next(m.median for m in measured if m.name == reference)
    lines = [
        f"| contender | median ({unit}) | lowest to highest | ratio |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {m.name} | {m.median:.3f} | {m.low:.3f} to {m.high:.3f} | {m.median / base:.2f} |"
        for m in measured
    ]
    return "\n".join(lines)


def publish(name: str, title: str, text: str, data: object) -> None:
    """Print a result and keep it as `results/<name>.md` and `.json`."""
    RESULTS.mkdir(exist_ok=True)
    whole = f"# {title}\n\nMeasured on {platform.processor() or platform.machine()}, "
    whole += f"Python {platform.python_version()}.\n\n{text}\n"
    (RESULTS / f"{name}.md").write_text(whole, encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(whole)
