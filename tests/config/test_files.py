"""What one command composes is made of files that were read once, and are left as they were."""

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from orchestrator.config.command_line import CommandLine
from orchestrator.config.composer import Composer
from orchestrator.config.loader import Files, Loader, search_path

LINES = (
    [],
    ["job._target_=my.A", "+job.width=3"],
    ["optimizer=sgd", "train.seed=7", "~tracker"],
    ["+cluster=slurm", "+cluster.options.a=1", "hydra.job.name=one"],
    ["job=line", "+job.more={deep: [1,2]}", "++optimizer.rate=2"],
)


def composed(loader, line):
    found = loader.load_configuration("config", list(line), RunMode.RUN)
    return OmegaConf.to_yaml(found), OmegaConf.to_container(found.hydra.runtime.choices)


def test_a_composition_leaves_nothing_behind_for_the_next_one():
    loader = Loader(None)
    for line in (*LINES, *LINES):
        assert composed(loader, line) == composed(Loader(None), line)


def test_to_the_end_of_a_command_a_file_says_what_it_said_at_first(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\ntrain: {seed: 3}\n")
    line = CommandLine(config_dir=str(tmp_path), config_name="mine", multirun=True)
    command = Composer(line)
    command.compose()
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\ntrain: {seed: 4}\n")
    [point] = command.points([["train.updates=2"]])
    assert point.values["train"]["seed"] == 3
    [later] = Composer(line).points([["train.updates=2"]])
    assert later.values["train"]["seed"] == 4


def test_a_search_path_of_one_composition_is_that_ones_alone(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "digits.yaml").write_text("_target_: my.Other\n")
    loader = Loader(None)
    usual = composed(loader, [])
    with_path = loader.load_configuration(
        "config", [f"hydra.searchpath=[file://{tmp_path}]"], RunMode.RUN
    )
    assert with_path.job._target_ == "my.Other"
    assert composed(loader, []) == usual


def test_what_is_not_there_is_asked_for_once_and_is_none():
    files = Files(search_path(None))
    assert files.load_config("job/nowhere") is None
    assert files.load_config("job/nowhere") is None
    with pytest.raises(AttributeError):
        files.load_config("base").no_such_attribute  # noqa: B018
