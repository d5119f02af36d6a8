"""Values that nothing could run, and files and lines that cannot be read, are a sentence."""

import re

import pytest

from orchestrator.config.composer import compose
from orchestrator.config.loader import Loader
from orchestrator.config.reading import read_config
from orchestrator.errors import ConfigError, expand_user
from orchestrator.slurm_client import SlurmClient

JOB = {"job": {"_target_": "a.B"}, "optimizer": {"name": "sgd"}}


@pytest.mark.parametrize("values", ["range(1,1000000000)", "range(0,1,1e-12)", "range(1000000)"])
def test_a_range_of_too_many_points_is_refused_before_they_are_made(values):
    with pytest.raises(ConfigError, match="more than 10000 points"):
        Loader(None).refuse_sweep([f"train.seed={values}"])
    Loader(None).refuse_sweep(["accumulation.steps=range(1,9)", "train.seed=range(0,100,2)"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: {\n", r"mine\.yaml, line 2: "),
        (b"job: {_target_: *nobody}\n", r"mine\.yaml, line 1: found undefined alias"),
        (b"train: {seed: \xff}\n", "is no YAML: .*decode"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, content, words):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        compose([], str(tmp_path), "mine")


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


def test_the_home_of_an_unknown_user_is_refused():
    for use in (expand_user, SlurmClient, lambda path: compose([], path)):
        with pytest.raises(ConfigError, match="~nobody-here/x: there is no user nobody-here"):
            use("~nobody-here/x")


def test_two_lengths_of_a_run_are_refused():
    with pytest.raises(ConfigError, match=r"train.updates=9 and train.epochs=1 are two lengths"):
        compose(["train.updates=9", "train.epochs=1"])
    assert compose(["train.updates=null", "train.epochs=1"]).train.epochs == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+experiment=jepa_240", "on the line write experiment=… without +"),
        ('train.seed="', "a quote or a bracket is not closed"),
    ],
)
def test_what_the_parsers_say_is_put_into_words(override, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose([override])
