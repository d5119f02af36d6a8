"""A point that is set in another one's composition is the point that Hydra composes whole."""

from dataclasses import asdict

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from orchestrator.config import reading
from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import MAX_SHARED, Composer
from orchestrator.config.reading import read_config, to_yaml
from orchestrator.errors import ConfigError

PRIMARY = {
    "defaults": ["base", "_self_"],
    "facts": {"parameters": "${sum_of:${train.seed},${.dataset_samples}}"},
    "run": {"name": "seed-${train.seed}-${hydra.job.num}"},
    "job": {
        "width": 5,
        "copy": {"of": ["${job.width}", "${optimizer.weight_decay}"]},
        "pick": "${.copy.of}",
    },
    "optimizer": {"weight_decay": 0.5},
}
VALUES = {
    "train.seed": ["1", "2", "3", "x", "null", "1.5", "'4'", "007", "1_0", "-0", "+2", "1e1"],
    "train.epochs": ["1", "2", "0.50", "1.", ".5", "-0.0", "9" * 19, "9" * 400],
    "+tracker.options.rate": ["1", "2.0", "02"],
    "train.clip_norm": ["null", "1", "0.5", "true"],
    "train.updates": ["3", "5", "${train.seed}"],
    "job.width": ["1", "2.5", "text", "null", "[1,2]", "{a: 1}", "~/x", "???", '"a b"'],
    "job.inner.depth": ["1", "a"],
    "job.inner": ["1", "{depth: 3}"],
    "job._target_": ["my.A", "my.B"],
    "job": ["line", "digits"],
    "optimizer": ["sgd", "adam", "null"],
    "optimizer.weight_decay": ["0.1", "0"],
    "cluster.nodes": ["1", "2", "{min: 1, max: 2}", "many"],
    "cluster": ["slurm", "slurm_dev"],
    "facts.dataset_samples": ["10", "20"],
    "hydra.sweep.subdir": ["p${hydra.job.num}", "q${hydra.job.override_dirname}", "${train.seed}"],
    "+train.seed": ["1", "2"],
    "+job.more": ["1", "2"],
    "~job.width": ["1", "2.5"],
    "acumulation.steps": ["1", "2"],
    "accumulation.steps": ["1", "2"],
}


@st.composite
def batches(draw):
    """Points of a sweep, the same keys with other values, as sweepers make them; and a stranger."""
    keys = draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4))
    stranger = draw(st.lists(st.sampled_from(list(VALUES)), max_size=2))
    chosen = [keys, keys, stranger, keys]
    return [[f"{key}={draw(st.sampled_from(VALUES[key]))}" for key in point] for point in chosen]


def composed(composer, points):
    """Yield each point in plain values, or the message of its refusal."""
    for number, point in enumerate(points):
        try:
            yield composer.point(number, point)
        except ConfigError as error:
            yield str(error)


@settings(max_examples=4)
@given(points=batches(), own=st.booleans())
def test_points_that_share_a_composition_are_those_that_are_composed_whole(
    points, own, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("conf")
    (folder / "mine.yaml").write_text(yaml.safe_dump(PRIMARY))
    line = CommandLine(
        config_dir=str(folder) if own else None,
        config_name="mine" if own else "config",
        multirun=True,
    )
    whole = Composer(line)
    whole._shared = dict.fromkeys(range(MAX_SHARED))  # full, so each point is composed whole
    for shared, alone in zip(
        composed(Composer(line), points), composed(whole, points), strict=True
    ):
        assert shared == alone
        if not isinstance(shared, str):
            assert repr(shared) == repr(alone), "1, 1.0 and True are not the same"


def test_sweeping_values_composes_twice_and_a_choice_of_files_each_time(monkeypatch):
    composer = Composer(CommandLine(multirun=True))
    composer.compose()
    loads = []
    load = composer.load
    # counted, and done all the same
    monkeypatch.setattr(composer, "load", lambda *a: loads.append(a) or load(*a))
    where = ["+cluster=slurm_dev", "+cluster.slurm_flags.begin=now", "run.dir=x"]
    for n in range(50):
        composer.point(n, [*where, f"train.seed={n}", f"job.width={n % 3}"])
    assert len(loads) == 1
    for name in ("sgd", "adam", "sgd"):
        composer.point(0, [f"optimizer={name}"])
    assert len(loads) == 3, "the third chooses what the first chose"
    named = [f"job._target_={name}" for name in ("my.A", "my.B")]
    for n in range(50):  # as the README has it
        composer.point(n, [named[n % 2], "schedule.base_lr=0.1", f"accumulation.steps={n + 1}"])
    assert len(loads) == 5, "once for each class"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"train": {"seed": 3, "clip_norm": 1}, "job": {"_target_": "a.B", "layers": [1, {"b": 2}]}},
        {"cluster": {"nodes": {"min": 1, "max": 2}, "time_min": "7"}},
        {"cluster": {"preamble": ["a"], "slurm_flags": {"a": True}, "environment": {"A": "1"}}},
        {"train": {"seed": "x"}, "run": 3},
        {"train": {"seed": True}},
        {"train": None},
        {"train": {"sede": 3}},
        {"tarin": {}},
        {"job": {"word": "${HOME}", 3: 4}},
        {"job": {"word": "a\n${", "path": "/a: b", "yes": "no"}},
        {"transport": "???"},
        {"job": {"deep": ["???"]}},
    ],
)
def test_a_configuration_read_directly_is_that_of_omegaconf(values, monkeypatch):
    def read():
        try:
            found = read_config(values)
        except ConfigError as error:
            return str(error)
        assert to_yaml(found) == OmegaConf.to_yaml(OmegaConf.create(asdict(found)))
        return repr(found)

    def convert(*_):
        raise reading._NeedsConversion

    direct = read()
    monkeypatch.setattr(reading, "_direct", convert)
    assert direct == read()
