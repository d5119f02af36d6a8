"""Messages about the configuration. What one suggests is not refused in its turn."""

import re

import pytest

from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer
from orchestrator.errors import UsageError
from orchestrator.runs.start import prepare

WRONG = [
    ["optimizer.lr=0.1"],
    ["+optimizer.learning_rate=0.1"],
    ["optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.1"],
    ["optimizer.momentum=0.9"],
    ["optimizer=sgd", "optimizer.eps=0.1"],
    ["optimizer.betaz=[0.9,0.99]"],
    ["optimizer=adm"],
    ["accumulation.stpes=2"],
    ["lr=0.1"],
    ["epochs=3"],
    ["train.learning_rate=0.1"],
    ["accumulation.steps=0"],
    ["transport=glooo"],
    ["transport=nccl"],
    ["optimizer=null"],
    ["~job.dorpout"],
    ["hydra.sweeper=null"],
    ["hydra.launcher="],
    ["accumulate_grad_batches=2"],
    ["train.gradient_accumulation_steps=2"],
    ["gradient_clip_val=1"],
    ["max_epochs=3"],
    ["train.max_epochs=3"],
    ["train.num_train_epochs=3"],
    ["num_workers=2"],
    ["nnodes=1"],
    ["train.precision=bf16-mixed"],
    ["train.precision=64-true"],
]


def refusal(overrides):
    try:
        prepare(Composer(read_command_line(overrides)).compose().config())
    except UsageError as error:
        return str(error)
    return None


def followed(overrides, said):
    """The command line with the hint of a message in place of what was refused: the last word."""
    *before, wrong = overrides
    key, _, value = wrong.lstrip("+").partition("=")
    if set_or_tried := re.findall(r"(?:set|try|does:) ((?:[\w.@/]+=\S+ ?)+)", said):
        return [*before, *set_or_tried[-1].rstrip(" ;").split()]
    if meant := re.search(r"did you mean '([^']+)'", said):
        word = meant[1]
        if f"called '{value}'" in said or repr(value) in said:  # a choice
            return [*before, f"{key}={word}"]
        if word != key and ("." in word or "." not in key):
            return [*before, f"{word}={value}"]
        return [*before, f"{key.rpartition('.')[0]}.{word}={value}"]
    assert "leave" in said, f"no way out: {said}"
    return before


@pytest.mark.parametrize("overrides", WRONG, ids=" ".join)
def test_a_hint_that_is_followed_leads_on(overrides):
    said = refusal(overrides)
    assert said is not None
    again = followed(overrides, said)
    assert again != overrides
    assert refusal(again) is None, f"{said}\nthen {again}"


MESSAGES = {
    "lib/ddp.py": (
        "'lib/ddp.py' is not KEY=VALUE: a program comes after --, and its arguments after "
        "it: python -m orchestrator run -- lib/ddp.py"
    ),
    "status": (
        "'status' is not KEY=VALUE: a verb follows python -m orchestrator: python -m "
        "orchestrator status"
    ),
    "digits": (
        "'digits' is not KEY=VALUE: a choice is written as in job=digits, a value as in "
        "digits=VALUE"
    ),
    "conf/main.yaml": (
        "'conf/main.yaml' is not KEY=VALUE: a configuration is named by --config-dir conf "
        "--config-name main"
    ),
    "--epochs 3": (
        "there is no flag '--epochs'; settings are written without dashes: train.epochs=3"
    ),
    "--batch-size=8": (
        "there is no flag '--batch-size'; settings are written without dashes: "
        "accumulation.global_batch=8"
    ),
    "--train.seed": (
        "there is no flag '--train.seed'; settings are written without dashes: train.seed=VALUE"
    ),
    "accumulation.stpes=2": "there is no key 'accumulation.stpes'; did you mean 'steps'?",
    "optimizer.betaz=3": "adam takes no 'betaz' (from optimizer.betaz); did you mean 'betas'?",
    "train.seed=1e3": "train.seed must be a whole number, but is 1000.0; try train.seed=1000",
    "train.seed=many": "train.seed must be a whole number, but is 'many'",
    "schedule.base_lr=": "schedule.base_lr must be a number, but is ''",
    "transport=null": "transport cannot be null; leave it out, or put a text in quotes: 'null'",
    "run.tags=[null]": "run.tags[0] cannot be null; leave it out, or put a text in quotes: 'null'",
    "train=long": "train is a section, whose keys are set one by one: train.NAME=VALUE",
    "train.updates=9 train.epochs=1": (
        "train.updates=9 and train.epochs=1 are two lengths of the run; leave one of them out"
    ),
    "train.seed=1,2": (
        "train.seed=1,2 holds commas: to sweep over its values add -m (in Python: "
        "start_sweep()), for a list write train.seed=[1,2], for one text train.seed=\"'1,2'\""
    ),
    "cluster.partition=gpu": (
        "cluster.partition means nothing on a local cluster; add +cluster=slurm, or leave it out"
    ),
}
"""Lines and their whole messages; other tests of this area assert what `refused` does."""


@pytest.mark.parametrize("line", MESSAGES)
def test_message(line):
    assert refusal(line.split()) == MESSAGES[line]
