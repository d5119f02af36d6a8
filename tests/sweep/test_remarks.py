"""What a sweep says of differing weights: rounding where only the split differs, else the cause."""

from dataclasses import replace

import pytest

from orchestrator.config.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.plan.parts import Known
from orchestrator.plan.plan import Plan
from orchestrator.report.sweep_tables import SweptRun, remarks, timed_concurrently
from orchestrator.rundir.folder import RunDir


@pytest.fixture
def cells(tmp_path):
    def make(*points):
        made = []
        for number, point in enumerate(points):
            folder = tmp_path / str(number)
            folder.mkdir()
            config = compose([*point.split(), f"run.dir={folder}"])
            RunDir(folder).write_config(to_yaml(config))
            plan = Plan.of(config, Known(dataset_samples=1437)).to_json()
            overrides = {"accumulation": point}
            result = {"state": "finished"}
            made.append(SweptRun(overrides=overrides, folder=folder, result=result, plan=plan))
        return made

    return make


def test_both_are_said_of_a_sweep_that_has_both(cells):
    many = "accumulation.global_batch=128 accumulation.steps=4"
    other, rounding = remarks(cells(many, "accumulation.global_batch=128", "train.seed=1", many))
    assert other.startswith("Weights of point 2 differ")
    assert "train.seed" in other
    assert "magnifies" in rounding


def test_nothing_is_said_of_weights_that_do_not_differ(cells):
    made = cells("job.dropout=0.0", "job.dropout=0.1", "train.seed=1", "accumulation.steps=2")
    told = [
        replace(cell, result={"state": "finished", "weights_sha256": digest})
        for cell, digest in zip(made, ["a" * 64, "a" * 64, "b" * 64, "a" * 64], strict=True)
    ]
    [said] = remarks(told)
    assert said.startswith("Weights of point 2 differ")
    assert remarks([*told[:2], told[3]]) == []


def test_float64_and_sgd_magnify_nothing(cells):
    same = "optimizer=sgd accumulation.steps="
    assert remarks(cells(f"{same}1", f"{same}2")) == []


def test_points_that_were_timed_beside_others_are_named(tmp_path):
    def point(name, *ends, held=True):
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.write_own(run.submission, {"held": held})
        updates = [
            {"update": n, "time": float(end), "update_s": 1.0, "attempt": n // 2}
            for n, end in enumerate(ends)
        ]
        return SweptRun(overrides={}, folder=run.path, updates=updates)

    first, inside_it = point("0", 11, 12, 50, 51), point("1", 51)
    between_its_attempts, after = point("2", 20, 21), point("3", 60, 61)
    elsewhere = point("4", 60, 61, held=False)
    assert timed_concurrently([first, between_its_attempts, after, elsewhere]) is None
    found = timed_concurrently([first, inside_it, between_its_attempts, after])
    assert found.startswith("Points 0, 1 were timed side by side")
    assert timed_concurrently([first, inside_it]).startswith("All points")
    assert remarks([first, inside_it]) == [timed_concurrently([first, inside_it])]
