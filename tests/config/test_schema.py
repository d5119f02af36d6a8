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
from tests.refusals import refused


def test_without_a_cluster_a_run_is_local_with_two_nodes_of_two_ranks():
    cluster = compose([]).cluster
    assert (cluster.kind, cluster.nodes, cluster.ranks_per_node) == ("local", 2, 2)


def test_a_cluster_choice_does_not_overrule_what_an_experiment_says_of_nodes():
    cluster = compose(["+cluster=slurm", "experiment=jepa_240"]).cluster
    assert (cluster.kind, cluster.nodes, cluster.ranks_per_node) == ("slurm", 30, 8)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("accumulation.steps=many", "accumulation.steps"),
        ("cluster.nodes=0", "cluster.nodes 1"),
        ("cluster.nodes={min:3,max:2}", "cluster.nodes 1"),
        ("cluster.nodes=two", "cluster.nodes"),
        ("cluster.partition=gpu", "cluster.partition +cluster=slurm"),
        ("accumulation.reduction=reproducible", "accumulation.micro_batch=16"),
        ("train.updates=[1", "train.updates=[1"),
        ("optimizer.betaz=3", "adam betaz optimizer.betaz betas"),
        ("job._target_=null", "job._target_"),
        ("+experiment=jepa_240", "experiment experiment=… +"),
        ('train.seed="', 'train.seed=" quote'),
        ("train=long", "train train.NAME=VALUE"),
        ("optimizer=3", "optimizer optimizer=adam"),
        ("transport=null", "transport null"),
    ],
)
def test_unusable_value_is_refused(override, names):
    with refused(ConfigError, names):
        compose([override])


def test_all_problems_are_reported_at_once():
    with refused(ConfigError, "accumulation.steps 1 train.seed 0"):
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
def test_values_outside_of_bounds_are_refused(dotted, value):
    section, _, name = dotted.rpartition(".")
    values = {"job": {"_target_": "my.Job"}, "optimizer": {"name": "adam"}}
    values |= {section: {name: value}} if section else {name: value}
    with refused(ConfigError, dotted):
        read_config(values)


JOB = {"job": {"_target_": "a.B"}, "optimizer": {"name": "sgd"}}


@pytest.mark.parametrize("values", ["range(1,1000000000)", "range(0,1,1e-12)", "range(1000000)"])
def test_range_of_too_many_points_is_refused(values):
    with refused(ConfigError, "train.seed 10000"):
        Loader(None).refuse_sweep([f"train.seed={values}"])
    Loader(None).refuse_sweep(["accumulation.steps=range(1,9)", "train.seed=range(0,100,2)"])


def test_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"train: {seed: \xff}\n")
    with refused(ConfigError, "YAML decode"):
        compose([], str(tmp_path), "mine")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"cluster": {"nodes": 10**9}}, "cluster.nodes cluster.ranks_per_node 1048576"),
        (
            {"cluster": {"nodes": {"min": 1, "max": 10**9}}},
            "cluster.nodes cluster.ranks_per_node 1048576",
        ),
        ({"run": {"name": "x" * 5000}}, "run.name 4096"),
        (
            {"accumulation": {"batch_schedule": [[0, 8]]}},
            "accumulation.batch_schedule accumulation.global_batch",
        ),
        ({"accumulation": {"batch_schedule": [[9, 2**63]]}}, "accumulation.batch_schedule 2**63"),
        ({"accumulation": {"batch_schedule": 8}}, "accumulation.batch_schedule"),
        ({"train": {"updates": 9, "samples": 100}}, "train.updates=9 train.samples=100"),
        ({"train": {"samples": 0}}, "train.samples 1"),
        ({"job": {"_target_": "a.B", "x": [{"y": "\x1b[0m"}]}}, "job.x[0].y"),
    ],
)
def test_impossible_numbers_are_refused(values, names):
    with refused(ConfigError, names):
        read_config(JOB | values)


def test_the_home_of_an_unknown_user_is_refused():
    for use in (expand_user, SlurmClient, lambda path: compose([], path)):
        with refused(ConfigError, "~nobody-here/x nobody-here"):
            use("~nobody-here/x")


def test_two_lengths_of_a_run_are_refused():
    with refused(ConfigError, "train.updates=9 train.epochs=1"):
        check_overrides(["train.updates=9", "train.epochs=1"])
    with refused(ConfigError, "train.updates=9 train.samples=1"):
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
