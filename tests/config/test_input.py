"""Bounds before parsing: what is too long, too deep, too much or no text is a sentence."""

import os
import re
import signal
import time

import pytest

from orchestrator.config import guard
from orchestrator.config.composer import compose
from orchestrator.config.reading import read_config
from orchestrator.errors import ConfigError, PlanError
from orchestrator.plan.batch import resolve_batch

JOB = {"job": {"_target_": "a.B"}, "optimizer": {"name": "sgd"}}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("job.x=" + "x" * 70_000, "70006 characters"),
        ("job.x=" + "[" * 3000, "nested more than 64 deep"),
        ("+" + "a." * 100 + "a=1", "nested more than 64 deep"),
        ("job.x=\x1b[31m", "control character 0x1b"),
        ("job.x=" + os.fsdecode(b"\xff"), "not UTF-8"),
        ("train.seed=range(1,1000000000)", "more than 10000 points"),
        ("train.seed=range(0,1,1e-12)", "more than 10000 points"),
        ("train.seed=range(1000000)", "more than 10000 points"),
        ("train.seed=range(start=1,stop=1e9)", "more than 10000 points"),
    ],
)
def test_an_argument_beyond_bounds_is_refused_before_it_is_parsed(argument, words):
    began = time.process_time()
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        guard.check_arguments([argument])
    assert time.process_time() - began < 1


def test_sweeps_of_a_sane_size_are_let_through():
    guard.check_arguments(["accumulation.steps=range(1,9)", "train.seed=range(0,100,2)"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\n", None),
        ("\n".join(
            ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
            + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
        ), "more than 100000 values"),
        ("job: &a {x: *a}\n", "stands for nothing complete"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("a: 1\n" + "b: é\n", None),
        ("x: " + "y" * 300_000, "larger than 256 KiB"),
        ("a: {\n", "line 2"),
    ],
)  # fmt: skip
def test_a_file_is_measured_before_it_is_loaded(tmp_path, content, words):
    path = tmp_path / "x.yaml"
    path.write_text(content, encoding="utf-8")
    if words is None:
        guard.check_file(path)
        return
    with pytest.raises(ConfigError, match=words):
        guard.check_file(path)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    for path in (tmp_path / "fifo.yaml", tmp_path, tmp_path.joinpath("/dev/zero")):
        with pytest.raises(ConfigError, match="regular"):
            guard.check_file(path)


# Hypothesis, where other tests of this process use it, counts the collector's time in a callback of
# its own, which may be what is interrupted.
@pytest.mark.filterwarnings("ignore:.*gc_callback:pytest.PytestUnraisableExceptionWarning")
def test_values_that_refer_to_each_other_for_ever_are_given_up(monkeypatch):
    """Forty values of two references each: 2^40 look-ups, which nobody waits for."""
    monkeypatch.setattr(guard, "LIMIT_S", 1.0)
    chain = [f"+job.x{n}='${{job.x{n - 1}}}${{job.x{n - 1}}}'" for n in range(1, 41)]
    before = signal.getsignal(signal.SIGPROF), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    began = time.process_time()
    with pytest.raises(ConfigError, match="refer to each other"):
        compose(["+job.x0=x", *chain])
    assert time.process_time() - began < 20
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    # Neither what the process had for this signal, nor an alarm of its own, is gone.
    assert before == (signal.getsignal(signal.SIGPROF), signal.getitimer(signal.ITIMER_REAL)[0] > 0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"train": {"seed": 2**63}}, "train.seed must lie between"),
        ({"cluster": {"nodes": 10**9}}, "ranks; at most 1048576"),
        ({"cluster": {"nodes": {"min": 1, "max": 10**9}}}, "ranks; at most 1048576"),
        ({"cluster": {"ranks_per_node": 10**6}}, "cluster.ranks_per_node must be at most 4096"),
        ({"cluster": {"collective_timeout_s": 1e300}}, "must be at most"),
        ({"run": {"name": "x" * 5000}}, "at most 4096 characters"),
        ({"job": {"_target_": "a.B", "x": [{"y": "\x1b[0m"}]}}, r"job.x\[0\].y must not contain"),
    ],
)
def test_numbers_that_nothing_could_run_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        read_config(JOB | values)


def test_a_window_of_too_many_micro_batches_is_refused_before_its_table_is_made():
    with pytest.raises(PlanError, match="micro-batches; at most"):
        resolve_batch(global_batch=10**12, steps=None, micro_batch=1, ranks=4)
    resolve_batch(global_batch=10**12, steps=4, micro_batch=None, ranks=4)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+experiment=jepa_240", "leave the + out, as in experiment="),
        ('train.seed="', "a quote or a bracket is not closed"),
    ],
)
def test_what_the_parsers_say_is_put_into_words(override, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose([override])
