# ruff: noqa: RUF001 - the signs that are printed.
"""A plan on the screen."""

from orchestrator.report.tables.plan_table import print_plan
from tests.plan.stated import make_plan
from tests.report.conftest import Screen


def show(plan, **options):
    screen = Screen(**options)
    print_plan(plan, screen)
    return screen.text


def test_equal_ranks_share_a_row():
    plan = make_plan(nodes=30, ranks_per_node=8, global_batch=3072, micro_batch=10)
    text = " ".join(show(plan.to_json()).split())
    assert "240 ranks on 30 nodes" in text
    assert "3,072 samples in 2 micro-steps of at most 10 samples" in text
    assert "ranks 0–191 13 samples = 7+6 ranks 192–239 12 samples = 6+6" in text


def test_what_is_unknown_says_why():
    text = show(make_plan(nodes=1, ranks_per_node=2, global_batch=8, steps=2).to_json())
    assert "unknown (the data set is not looked at here)" in text
    assert "unknown (the model is not built here)" in text


def test_what_is_known_is_shown():
    plan = make_plan(nodes=1, ranks_per_node=2, global_batch=8, steps=2, dataset_samples=80,
                     parameters=1000, base_lr=0.1, warmup_updates=2, decay="cosine")  # fmt: skip
    text = show(plan.to_json())
    assert "unknown" not in text
    assert "10 (1 epoch)" in text
    assert "peak 0.1" in text
    assert "per update and rank" in text


def test_idle_ranks_and_warnings_are_shown_with_their_brackets():
    plan = make_plan(nodes=1, ranks_per_node=3, global_batch=2, steps=1).to_json()
    text = show({**plan, "warnings": ["see [accumulation]"]})
    assert "idle" in text
    assert "warning: see [accumulation]" in text


def test_ten_thousand_unlike_ranks_fit_a_screen():
    plan = {"ranks": 10000, "nodes": 1250, "micro_batches": [[n % 97 + 1] for n in range(10000)]}
    lines = show(plan).splitlines()
    assert len(lines) < 30
    assert "and 85 more groups (see --json)" in " ".join(lines)
    assert all(len(line) <= 80 for line in lines)


def test_a_stream_of_ascii_gets_ascii():
    plan = make_plan(nodes=1, ranks_per_node=2, global_batch=80, micro_batch=7).to_json()
    assert show(plan, encoding="ascii").isascii()
