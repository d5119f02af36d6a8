"""Seeded faults, right loops and generated ones, judged on one, two and three ranks."""

import json
import subprocess
import sys

import pytest

from orchestrator.audit.faults import FAULTS
from orchestrator.audit.judge import RIGHT, ROWS, WRONG, judge, read_trace
from orchestrator.cli.audit import Audit
from tests.audit import generated, loop
from tests.helpers import environment

NEED_RANKS = {
    "mean-of-means-over-ranks", "not-reduced", "reduced-each-micro-step", "same-data",
    "clipped-before-reduction", "fewer-micro-steps",
}  # fmt: skip
SEEDS = 20


def observed(folder, size):
    """Return the judgement of each loop on some ranks, and what was drawn, by name or seed."""
    begin = 1000 * size
    words = [str(folder), str(begin), str(begin + SEEDS), *loop.FAULTS, *loop.RIGHT]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.audit.observed", *words],
            env=environment(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    for rank in ranks:
        _, complaint = rank.communicate(timeout=240)
        assert rank.returncode == 0, complaint
    found = {}
    for name in [*loop.FAULTS, *loop.RIGHT, *map(str, range(begin, begin + SEEDS))]:
        traces = [read_trace(folder / name, rank) for rank in range(size)]
        found[name] = Audit(size, judgement=judge(traces))
    specs = {
        str(seed): json.loads((folder / str(seed) / "spec.json").read_text())
        for seed in range(begin, begin + SEEDS)
    }
    return found, specs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_verdicts(tmp_path, size):
    found, specs = observed(tmp_path, size)
    check_that_each_seeded_fault_is_named_and_no_other(found, size)
    check_that_right_loops_are_right_in_every_row(found)
    check_that_no_verdict_contradicts_plain_autograd(found, specs, size)
    check_that_generated_loops_are_mostly_judged(found, specs)


def check_that_each_seeded_fault_is_named_and_no_other(found, size):
    for fault in loop.FAULTS[1:]:
        made = found[fault]
        if size == 1 and fault in NEED_RANKS:
            assert made.state == RIGHT or fault == "fewer-micro-steps", (fault, made.judgement)
        else:
            assert made.state == WRONG, fault
            assert made.judgement.faults == [fault]
        assert set(made.judgement.faults) <= FAULTS.keys()


def check_that_right_loops_are_right_in_every_row(found):
    for name in ("none", *loop.RIGHT):
        made = found[name]
        states = {row: made.judgement.state(row) for row in ROWS}
        assert set(states.values()) == {RIGHT}, (name, states)
        assert max(u["relative_error"] for u in made.judgement.updates) < 1e-6


def check_that_no_verdict_contradicts_plain_autograd(found, specs, size):
    for seed, spec in specs.items():
        state, fault = found[seed].state, spec["fault"]
        exact = max(spec["errors"]) <= (2e-2 if fault == "autocast" else 1e-4)
        alone = size == 1 and fault in ("same-data", "reduced-each", "clip-before")
        otherwise = not alone and fault in (
            *generated.WRONG_OTHERWISE, "clip-each", "clip-before",
        )  # fmt: skip
        if state == RIGHT:
            assert exact, (seed, spec)
            assert not otherwise, (seed, spec)
        if state == WRONG:
            assert not exact or otherwise, (seed, spec, found[seed].judgement.faults)


def check_that_generated_loops_are_mostly_judged(found, specs):
    hidden = ("factor", "noise", "layer-scaled", "two-terms", "contrastive")
    judgeable = [seed for seed, spec in specs.items() if spec["fault"] not in hidden]
    assert all(found[seed].state in (RIGHT, WRONG) for seed in judgeable)
