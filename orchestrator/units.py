# ruff: noqa: RUF001, RUF002 - the multiplication sign is meant: `2x` reads as a name.
"""Numbers for people: bytes, counts, seconds, rates, shares, ratios.

Every function takes a plain number in base units (bytes, seconds, samples) and returns text without
markup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.errors import ConfigError

UNKNOWN = "unknown"
Units = Sequence[tuple[float, str]]  # sizes and names, in order of size
SECONDS: Units = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "d"))
BYTES: Units = (
    (1.0, "B"),
    (2.0**10, "KiB"),
    (2.0**20, "MiB"),
    (2.0**30, "GiB"),
    (2.0**40, "TiB"),
    (2.0**50, "PiB"),
)
FRACTION = re.compile(r"-?\d*\.\d+(e[+-]?\d{1,2})?")


def format_bytes(count: float | None) -> str:
    """Format bytes in binary units, because memory is bought and exhausted in those.

    >>> [format_bytes(n) for n in (0, 1023, 1024, 1536 * 1024, 3 * 1024**3, -2048)]
    ['0 B', '1,023 B', '1.00 KiB', '1.50 MiB', '3.00 GiB', '-2.00 KiB']
    >>> format_bytes(1024**2 - 1), format_bytes(None)
    ('1.00 MiB', 'unknown')
    """
    if count is None or not math.isfinite(count):
        return UNKNOWN
    if abs(count) < 1024:
        return f"{count:,.0f} B"
    value, units = count / 1024, [name for _, name in BYTES[1:]]
    # 1023.5 would be printed as 1024 of a unit, which is one of the next.
    while abs(value) >= 1023.5 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{_three_digits(value)} {units[0]}"


def unit_for(values: Iterable[float], units: Units) -> tuple[float, str]:
    """Return size and name of the unit for an axis of these values: the largest unit of which the
    largest value is at least two.

    >>> unit_for([0.004, 0.03], SECONDS), unit_for([7300.0], SECONDS), unit_for([90.0], SECONDS)
    ((0.001, 'ms'), (3600.0, 'h'), (1.0, 's'))
    >>> unit_for([500_000], BYTES), unit_for([], BYTES)
    ((1024.0, 'KiB'), (1.0, 'B'))
    """
    largest = max(values, default=0.0)
    return next((unit for unit in reversed(units) if largest >= 2 * unit[0]), units[0])


def format_count(count: float | None) -> str:
    """Format a whole number with separators; a mean that is not whole keeps one or two decimals.

    >>> [format_count(n) for n in (7, 1234567, 1.0, 1.25, 1234.5, None)]
    ['7', '1,234,567', '1', '1.25', '1,234.5', 'unknown']
    """
    if count is None or not math.isfinite(count):
        return UNKNOWN
    if count == int(count):
        return f"{int(count):,}"
    return f"{count:,.2f}" if abs(count) < 100 else f"{count:,.1f}"


def plural(count: float | None, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "node"), plural(1200, "rank"), plural(None, "sample")
    ('1 node', '1,200 ranks', 'unknown samples')
    """
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def first_few(texts: Sequence[str], most: int, *, noun: str = "", separator: str = ", ") -> str:
    """Join the first texts, and say how many more there are.

    >>> first_few(["a", "b", "c"], 3), first_few(["a", "b", "c", "d"], 2, noun="ranks")
    ('a, b, c', 'a, b and 2 more ranks')
    """
    shown, beyond = separator.join(texts[:most]), len(texts) - most
    return f"{shown} and {beyond} more {noun}".rstrip() if beyond > 0 else shown


def spans(numbers: Iterable[int]) -> list[str]:
    """Return numbers in order, with neighbours joined.

    >>> spans([3, 1, 2, 7])
    ['1-3', '7']
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges]


def named_numbers(noun: str, numbers: Sequence[int], most: int = 8) -> str:
    """Name numbered things, with ranges shortened to `most` groups: never longer than a line.

    >>> named_numbers("point", [0, 1, 2])
    'points 0-2'
    """
    texts = spans(numbers)
    beyond = len(texts) - most
    more = f" and {beyond} more group{'s' * (beyond > 1)}" if beyond > 0 else ""
    return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(texts[:most])}{more}"


def named_ranks(ranks: Sequence[int]) -> str:
    """Name ranks.

    >>> named_ranks([3]), named_ranks([1, 3, 4, 5])
    ('rank 3', 'ranks 1, 3-5')
    """
    return named_numbers("rank", ranks)


def format_seconds(seconds: float | None) -> str:
    """Format a duration in at most two units, so that it fits a column and is read at a glance.

    >>> [format_seconds(s) for s in (0, 0.00042, 0.0123, 1.5, 59.99, 125, 7260, 200000)]
    ['0 s', '0.42 ms', '12.3 ms', '1.50 s', '1 min 00 s', '2 min 05 s', '2 h 01 min', '2 d 07 h']
    >>> format_seconds(None), format_seconds(float("inf"))
    ('unknown', 'unknown')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    for size, large, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {large} {whole % size // part:02d} {small}"
    return f"{whole // 60} min {whole % 60:02d} s"


def format_rate(per_second: float | None, what: str = "samples") -> str:
    """Format a rate per second.

    >>> format_rate(12345.6), format_rate(3.21), format_rate(None), format_rate(2.5e7, "tokens")
    ('12,346 samples/s', '3.21 samples/s', 'unknown', '25.0M tokens/s')
    """
    if per_second is None or not math.isfinite(per_second):
        return UNKNOWN
    if abs(per_second) >= 1e7:
        return f"{per_second / 1e6:,.1f}M {what}/s"
    return f"{_three_digits(per_second)} {what}/s"


def format_percent(share: float | None) -> str:
    """Format a share of one as percent.

    >>> format_percent(0.123), format_percent(1), format_percent(None)
    ('12.3%', '100.0%', 'unknown')
    """
    return UNKNOWN if share is None or not math.isfinite(share) else f"{share * 100:.1f}%"


def short_number(text: str) -> str:
    """Shorten a fraction of many digits; return anything else as it is.

    >>> [short_number(t) for t in ("0.012345678901", "0.1", "20261123.0", "1234567890", "adam")]
    ['0.0123457', '0.1', '2.02611e+07', '1234567890', 'adam']
    """
    return format(float(text), "g") if len(text) > 8 and FRACTION.fullmatch(text) else text


def short_key(key: str, keys: Collection[str]) -> str:
    """Return the last part of a key, if no other of these keys ends in the same.

    >>> short_key("job.lr", ["job.lr", "train.seed"]), short_key("a.lr", ["a.lr", "b.lr"])
    ('lr', 'a.lr')
    """
    last = key.rpartition(".")[2]
    return last if [k.rpartition(".")[2] for k in keys].count(last) == 1 else key


def short_overrides(overrides: Mapping[str, Any]) -> str:
    """Return overrides with short keys and readable values.

    >>> short_overrides({"optimizer.lr": "0.012345678901", "train.seed": 1})
    'lr=0.0123457 seed=1'
    """
    return " ".join(
        f"{short_key(key, overrides)}={short_number(str(value))}"
        for key, value in overrides.items()
    )


def format_number(value: object) -> str:
    """Format a loss or a metric in four digits. NaN and infinities are shown, never hidden.

    >>> [format_number(v) for v in (0.123456, 2.5, 1e-7, 123456.0, 0, float("nan"), None, "n/a")]
    ['0.1235', '2.5000', '1.000e-07', '1.235e+05', '0', 'nan', 'unknown', 'n/a']
    """
    if value is None:
        return UNKNOWN
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4f}"


def format_learning_rate(rate: float | None) -> str:
    """Format a learning rate as in a configuration.

    >>> [format_learning_rate(r) for r in (0.001, 0.1, 0.00012346, 0.0, None)]
    ['0.001', '0.1', '0.0001235', '0', 'unknown']
    """
    return UNKNOWN if rate is None else f"{rate:.4g}"


def format_ratio(ratio: float | None) -> str:
    """Format a ratio.

    >>> [format_ratio(r) for r in (1.0, 0.2512, 12.34, 1e-4, None, float("inf"))]
    ['1.00×', '0.25×', '12.3×', '1.0e-04×', 'unknown', 'unknown']
    """
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    if 0 < abs(ratio) < 0.005:
        return f"{ratio:.1e}×"
    return f"{ratio:.2f}×" if abs(ratio) < 9.995 else f"{_three_digits(ratio)}×"


def _three_digits(value: float) -> str:
    """Format three significant digits above 1, all whole digits above 100."""
    size = abs(value)
    return f"{value:,.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


# ------------------------------------------------------------------ Time limits


def seconds(span: str) -> float | None:
    """Parse SLURM's spans of time: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.

    None for UNLIMITED, N/A and the like.

    >>> seconds("1-02:03:04"), seconds("0:59"), seconds("90"), seconds("1-12"), seconds("N/A")
    (93784.0, 59.0, 5400.0, 129600.0, None)
    """
    days, dash, rest = span.strip().rpartition("-")
    parts = rest.split(":")
    if not all(map(str.isdigit, [*parts, days] if dash else parts)) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if len(numbers) < 3:
        numbers = [*numbers, 0, 0] if dash else [0, *numbers, 0]
    return float(int(days or 0) * 86400 + numbers[0] * 3600 + numbers[1] * 60 + numbers[2])


def time_limit_min(text: str, key: str) -> int:
    """Return a time limit as SLURM writes it, in whole minutes, rounded up as sbatch does.

    >>> time_limit_min("4:00:00", "time"), time_limit_min("1-12", "time")
    (240, 2160)

    Raises:
        ConfigError: it is none of SLURM's forms.
    """
    limit_s = seconds(text)
    if limit_s is None:
        raise ConfigError(
            f"{key} is a time limit, as minutes (240) or in one of SLURM's forms (MINUTES:SECONDS, "
            f"HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, DAYS-HOURS:MINUTES:SECONDS), "
            f"but is {text!r}"
        )
    return math.ceil(limit_s / 60)
