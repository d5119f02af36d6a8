"""Refusals before anything is written, and their messages."""

import re
from dataclasses import fields, is_dataclass

import pytest

from orchestrator.clusters.slurm.scheduler import SlurmClient
from orchestrator.config.changes import flat
from orchestrator.config.command_line import check_overrides
from orchestrator.config.composer import compose
from orchestrator.config.loader import Loader
from orchestrator.config.reading import read_config, to_yaml
from orchestrator.config.schema import BOUNDS, Config, plain
from orchestrator.errors import ConfigError, expand_user
from tests.helpers import ROOT


def test_without_a_cluster_a_run_is_local_with_two_nodes_of_two_ranks():
    cluster = compose([]).cluster
    assert (cluster.kind, cluster.nodes, cluster.ranks_per_node) == ("local", 2, 2)


def test_a_cluster_choice_does_not_overrule_what_an_experiment_says_of_nodes():
    cluster = compose(["+cluster=slurm", "experiment=jepa_240"]).cluster
    assert (cluster.kind, cluster.nodes, cluster.ranks_per_node) == ("slurm", 30, 8)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("accumulation.steps=many", "accumulation.steps"),
        ("cluster.nodes=0", "cluster.nodes must be at least 1"),
        ("cluster.nodes={min:3,max:2}", "cluster.nodes must be at least 1"),
        ("cluster.nodes=two", "cluster.nodes must be a number"),
        ("cluster.partition=gpu", "means nothing on a local cluster"),
        ("accumulation.reduction=reproducible", "needs accumulation.micro_batch"),
        ("train.updates=[1", "the command line cannot be read"),
        (
            "optimizer.betaz=3",
            "adam takes no 'betaz' (from optimizer.betaz); did you mean 'betas'?",
        ),
        ("job._target_=null", "job._target_ must be"),
        ("+experiment=jepa_240", "on the line write experiment=… without +"),
        ('train.seed="', "a quote or a bracket is not closed"),
        ("train=long", "train is a section, whose keys are set one by one: train.NAME=VALUE"),
        ("optimizer=3", "a group (cluster, experiment, job, optimizer or tracker) takes"),
        ("transport=null", "transport cannot be null; leave it out"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_what_is_needed(override, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        compose([override])


def test_all_that_is_wrong_is_said_at_once():
    wrong = "accumulation.steps must be at least 1, but is 0.*\ntrain.seed must be at least 0"
    with pytest.raises(ConfigError, match=wrong):
        read_config({"accumulation": {"steps": 0}, "train": {"seed": -1}})


def test_the_written_configuration_reads_back_as_the_same():
    import yaml

    config = compose(["accumulation.steps=7", "cluster.nodes={min:1,max:3}"])
    assert read_config(yaml.safe_load(to_yaml(config))) == config


def _fields(schema=Config, prefix=""):
    for item in fields(schema):
        if is_dataclass(item.default_factory):
            yield from _fields(item.default_factory, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item.type.removesuffix(" | None")


def _outside(dotted, bound):
    if bound.choice:
        yield f"{bound.choice[0]}x"
    if bound.least is not None:
        yield bound.least - 1
    if bound.above is not None:
        yield from (bound.above, float("nan"), float("inf"))
    if bound.most is not None:
        yield bound.most * 2
    if "int" in dict(_fields())[dotted]:
        yield 2**63


@pytest.mark.parametrize(
    ("dotted", "value"),
    [(dotted, value) for dotted, bound in BOUNDS.items() for value in _outside(dotted, bound)],
)
def test_what_is_outside_of_a_bound_is_refused_by_its_name(dotted, value):
    section, _, name = dotted.rpartition(".")
    values = {"job": {"_target_": "my.Job"}, "optimizer": {"name": "adam"}}
    values |= {section: {name: value}} if section else {name: value}
    with pytest.raises(ConfigError, match=re.escape(f"{dotted} must ")):
        read_config(values)


JOB = {"job": {"_target_": "a.B"}, "optimizer": {"name": "sgd"}}


@pytest.mark.parametrize("values", ["range(1,1000000000)", "range(0,1,1e-12)", "range(1000000)"])
def test_a_range_of_too_many_points_is_refused_before_they_are_made(values):
    with pytest.raises(ConfigError, match="more than 10000 points"):
        Loader(None).refuse_sweep([f"train.seed={values}"])
    Loader(None).refuse_sweep(["accumulation.steps=range(1,9)", "train.seed=range(0,100,2)"])


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"train: {seed: \xff}\n")
    with pytest.raises(ConfigError, match=r"is no YAML: .*decode"):
        compose([], str(tmp_path), "mine")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cluster": {"nodes": 10**9}}, "ranks; at most 1048576"),
        ({"cluster": {"nodes": {"min": 1, "max": 10**9}}}, "ranks; at most 1048576"),
        ({"run": {"name": "x" * 5000}}, "at most 4096 characters"),
        ({"accumulation": {"batch_schedule": [[0, 8]]}}, "is no later update"),
        ({"accumulation": {"batch_schedule": [[9, 2**63]]}}, "must lie between"),
        ({"accumulation": {"batch_schedule": 8}}, "accumulation.batch_schedule"),
        (
            {"train": {"updates": 9, "samples": 100}},
            "train.updates=9 and train.samples=100 are two lengths of the run; leave one",
        ),
        ({"train": {"samples": 0}}, "train.samples must be at least 1"),
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
        check_overrides(["train.updates=9", "train.epochs=1"])
    with pytest.raises(ConfigError, match=r"train.updates=9 and train.samples=1 are two lengths"):
        check_overrides(["train.updates=9", "train.samples=1"])
    check_overrides(["train.updates=null", "train.epochs=1"])


# ------------------------------------------------------------------ docs/reference/configuration.md


PAGE = (ROOT / "docs" / "reference" / "configuration.md").read_text()
ROWS = {
    key: (values, default)
    for key, values, default in re.findall(
        r"^\| `([\w.]+)` \| (.*?) \| (.*?) \| .+ \|$", PAGE, re.MULTILINE
    )
}


def text_of(value):
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, dict | list):
        return "empty"
    return words[value] if value is None or isinstance(value, bool) else f"{value}"


def test_every_key_has_a_row_with_its_default_and_no_other_has():
    usual = flat(plain(Config()))
    documented = {key: default for key, (_, default) in ROWS.items()}
    assert {key: text_of(value).removesuffix(".0") for key, value in usual.items()} == documented


def test_every_row_has_the_choices_and_the_bounds_of_its_key():
    for key, bound in BOUNDS.items():
        values = ROWS[key][0]
        if bound.choice:
            assert values == ", ".join(bound.choice)
        for number in (bound.least, bound.above, bound.most):
            assert number is None or f"{number:,.12g}" in values, key
