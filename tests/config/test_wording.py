"""A value that a message suggests is not refused in its turn."""

import re

import pytest

from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer, compose
from orchestrator.errors import ConfigError, UsageError
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


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("lib/ddp.py", "python -m orchestrator run -- lib/ddp.py"),
        ("status", "python -m orchestrator status"),
        ("digits", "as in job=digits"),
        ("conf/main.yaml", "named by --config-dir conf --config-name main"),
    ],
)
def test_a_word_that_is_no_override_gets_a_sentence(word, way):
    assert way in refusal([word])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--epochs", "3"], "settings are written without dashes: train.epochs=3"),
        (["--batch-size=8"], "without dashes: accumulation.global_batch=8"),
        (["--train.seed"], "without dashes: train.seed=VALUE"),
    ],
)
def test_a_flag_of_another_tool_is_answered_with_our_setting(line, said):
    with pytest.raises(ConfigError, match=said):
        read_command_line(line)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.seed=1e3", "train.seed must be a whole number, but is 1000.0; try train.seed=1000"),
        ("train.seed=many", "train.seed must be a whole number, but is 'many'"),
        ("schedule.base_lr=", "schedule.base_lr must be a number, but is ''"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_our_words(override, said):
    with pytest.raises(ConfigError, match=said):
        compose([override])
