# ruff: noqa: RUF001 - the signs that are printed.
"""Tables over many runs: sweeps, and K = 1 against K = 4."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from orchestrator.report.sweep_tables import (
    Pair,
    SweptRun,
    accumulation_pairs,
    describe_outcome,
    differences,
    loss_at,
    print_sweep,
    swept_run,
    timed_concurrently,
    verdict,
)
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Figures, summarize
from tests.run_folders import Screen, record, result


def swept(k, *, seconds=0.2, peak=None, samples=256, weights=None, **changes):
    peak = [300 * 1024**2] if peak is None else [peak]
    ended = result(peak_memory_bytes=peak, **changes)
    updates = [record(n, update_s=seconds, samples=samples) for n in range(20)]
    return SweptRun(
        overrides={"accumulation.steps": k},
        folder=Path(f"runs/{k}"),
        result=ended,
        summary=summarize(ended, Figures(updates)),
        plan={
            "micro_steps": k,
            "global_batch": samples,
            "micro_batches": [[samples // k] * k],
            "ranks": 1,
        },
        weights=weights,
    )


def failed(k):
    culprit = {"rank": 3, "node": "node1", "cause": "out of memory [cuda]\nmore", "log_tail": []}
    return swept(k, state="failed", metrics={}, culprit=culprit)


@pytest.fixture
def weights(tmp_path):
    def write(name, *arrays):
        path = tmp_path / name
        save_file({f"w{n}": a for n, a in enumerate(arrays)}, path)
        return path

    return write


def test_differences_are_from_the_first_finished_point(weights, tmp_path):
    a, b = weights("a", np.ones(4)), weights("b", np.full(4, 1 + 1e-6))
    other = weights("c", np.ones(5))
    points = [
        failed(1),
        swept(2, weights=a),
        swept(3, weights=b),
        swept(4, weights=a),
        swept(5, weights=other),
        swept(6, weights=tmp_path / "gone"),
        swept(7),
    ]
    found = differences(points)
    assert found == ["-", "reference", "1.0e-06", "same bits", "other shapes", "-", "-"]


def test_a_row_for_each_point_and_the_cause_of_each_failure(screen, weights):
    a = weights("a", np.ones(4))
    overrides = {"accumulation.steps": 4, "x": "[b]"}
    points = [swept(1, weights=a), failed(2), SweptRun(overrides=overrides, folder=Path("runs/4"))]
    print_sweep(points, screen)
    text = screen.text
    assert "point 2 (accumulation.steps=2): rank 3 on node1 failed first: out of memory" in text
    assert "[cuda]" in text
    assert "\nmore" not in text
    assert "point 4 (accumulation.steps=4 x=[b]): no result, see runs/4" in text
    assert "1 of 3 points finished" in text
    for part in ("steps", "0.9534", "200 ms", "300 MiB", "reference"):
        assert part in text


def test_losses_of_different_batches_are_compared_after_equally_many_samples(tmp_path):
    def point(size, updates):
        run = RunDir(tmp_path / str(size))
        run.path.mkdir()
        lines = [record(n, samples=size, loss=1 - size * (n + 1) / 1e4) for n in range(updates)]
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        ended = result(samples=size * updates, updates=updates, metrics={})
        return SweptRun(
            overrides={"accumulation.global_batch": size},
            folder=run.path,
            result=ended,
            summary=summarize(ended, Figures(lines)),
        )

    small, large = point(100, 20), point(150, 30)
    assert loss_at(small, 2000) == pytest.approx(np.mean([0.81, 0.80]))
    # The tenth begins within the update that ends at 1,950 samples; 2,100 are the first with 2,000.
    assert loss_at(large, 2000) == pytest.approx(np.mean([0.805, 0.79]))
    assert loss_at(small, 2001) is None
    print_sweep([small, large], screen := Screen(width=200))
    text = " ".join(screen.text.split())
    assert "loss at 2,000 samples" in text
    for part in ("0.8050", "0.7975", "2,000", "4,500"):
        assert part in text
    again = Screen()
    print_sweep([small, small], again)
    assert "loss at" not in " ".join(again.text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_values_are_never_folded(width, weights):
    screen = Screen(width=width)
    metrics = {"accuracy": 0.5, "loss": 0.1, "calibration": 0.25}
    points = [swept(k, metrics=metrics, weights=weights("a", np.ones(4))) for k in (64, 1)]
    print_sweep(points, screen)
    lines = screen.text.splitlines()
    rows = [line for line in lines if line.split()[:1] == ["64"]]
    assert all(len(line) <= width for line in lines)
    whole = " ".join(rows)
    for part in (
        "finished",
        "4.50 s",
        "200 ms",
        "300 MiB",
        "0.5000",
        "0.2500",
        "2.00 MiB",
        "reference",
    ):
        assert part in whole
    assert len(rows) == (2 if width == 80 else 1)
    for word in ("accuracy", "calibration", "collectives"):
        assert word in screen.text


def test_the_verdict_is_taken_from_the_figures():
    one = swept(1, seconds=0.2, peak=1000)
    pair = Pair(title="equal global batch", fewer=one, more=swept(4, seconds=0.3, peak=400))
    assert verdict(pair) == (
        "At equal global batch, K=4 against K=1: time per update up (1.50×), "
        "time per sample up (1.50×), peak memory down (0.40×)."
    )
    pair = Pair(
        title="equal micro-batch", fewer=one, more=swept(4, seconds=0.76, peak=1010, samples=1024)
    )
    assert verdict(pair) == (
        "At equal micro-batch, K=4 against K=1: time per update up (3.80×), "
        "time per sample down (0.95×), peak memory about the same (1.01×)."
    )


def test_a_failed_run_is_compared_with_none():
    assert accumulation_pairs([swept(1), failed(4)]) == []


@pytest.mark.parametrize("key", ["train.seed", "accumulation.reduction"])
def test_points_are_paired_that_differ_in_their_batches_alone(key):
    small, large, four = swept(1, samples=64), swept(1), swept(4)
    same_micro_batch, same_batch = accumulation_pairs([small, large, swept(2), four])
    assert (same_micro_batch.fewer, same_micro_batch.more) == (small, four)
    assert (same_batch.fewer, same_batch.more) == (large, four)
    for stating in (four, large):  # the other's line did not state it
        stating.overrides[key] = "1"
        assert accumulation_pairs([large, four]) == []
        del stating.overrides[key]


def test_points_that_were_timed_beside_others_are_no_comparison(tmp_path):
    def point(name, *ends, held=True):
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        write_json(run.submission, {"attended": held})
        updates = [
            {"update": n, "time": float(end), "update_s": 1.0, "attempt": n // 2}
            for n, end in enumerate(ends)
        ]
        return SweptRun(overrides={}, folder=run.path, spans=[*Figures(updates).spans.values()])

    first, inside_it = point("0", 11, 12, 50, 51), point("1", 51)
    between_its_attempts, after = point("2", 20, 21), point("3", 60, 61)
    elsewhere = point("4", 60, 61, held=False)
    assert timed_concurrently([first, between_its_attempts, after, elsewhere]) is None
    found = timed_concurrently([first, inside_it, between_its_attempts, after])
    assert found.startswith("Points were timed side by side")


def test_what_is_kept_of_a_point_does_not_grow_with_its_updates_or_ranks(tmp_path):
    def kept(updates, ranks):
        run = RunDir(tmp_path / f"{updates:05}")
        run.create()
        run.metrics.write_text("".join(json.dumps(record(n)) + "\n" for n in range(updates)))
        write_json(run.plan, {"micro_batches": [[4, 4]] * ranks, "ranks": ranks})
        return len(pickle.dumps(swept_run(run, {})))

    assert kept(2_000, 10_000) < kept(20, 10) + 100


@pytest.mark.parametrize(
    ("plan", "updates", "counts"),
    [({"program": {"a": 1}}, 0, False), ({"program": {"a": 1}}, 3, True), ({}, 0, True)],
)
def test_the_outcome_counts_updates_unless_a_program_recorded_none(tmp_path, plan, updates, counts):
    run = RunDir(tmp_path)
    write_json(run.plan, plan)
    write_json(run.result, result(updates=updates, loss=None))
    assert (f"{updates} updates" in describe_outcome(run)) is counts
