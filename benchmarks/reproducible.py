"""The price of equal bits: an update of ten leaves of `digits` on 1 to 4 ranks."""

from __future__ import annotations

from benchmarks.link import loopback, on_ranks
from benchmarks.measure import publish

FAST, SAME_BITS = "ours", "ours, reproducible"
LEAVES = 10


def main() -> None:
    lines = [
        "| ranks | fast (ms) | reproducible (ms) | ratio of medians | collectives |",
        "|---:|---:|---:|---:|---:|",
    ]
    data: dict[str, object] = {}
    for ranks in (1, 2, 3, 4):
        found = on_ranks(
            loopback(ranks),
            f"--model=digits|--contenders={FAST};{SAME_BITS}|--leaves={LEAVES}|--repetitions=31".split(
                "|"
            ),
        )
        data[str(ranks)] = found
        row = {row["name"]: row for row in found["rows"]}
        fast, slow = row[FAST], row[SAME_BITS]
        lines.append(
            f"| {ranks} | {1000 * fast['median']:.1f} | {1000 * slow['median']:.1f} "
            f"| {slow['median'] / fast['median']:.2f} "
            f"| {fast['collectives']} and {slow['collectives']} |"
        )
    publish("reproducible", "What equal bits cost", "\n".join(lines), data)


if __name__ == "__main__":
    main()
