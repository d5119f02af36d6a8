"""Clear messages for the errors of Hydra and OmegaConf."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections import Counter
from collections.abc import Generator

from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from orchestrator.config.changes import flat
from orchestrator.config.schema import Config, plain
from orchestrator.errors import ConfigError, OrchestratorError, did_you_mean, nearest

_SIGN_IN_YAML = re.compile("cannot start any token|undefined alias|constructor for the tag")


@contextlib.contextmanager
def config_errors() -> Generator[None]:
    """Put everything that Hydra and OmegaConf raise about people's input into one message.

    Raises:
        ConfigError: in place of any exception but our own errors. `-v` shows the traceback.
    """
    try:
        yield
    except OrchestratorError:
        raise
    except Exception as error:
        if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
            sentence = f"{mark.name}, line {mark.line + 1}: {error.problem}"
            if _SIGN_IN_YAML.search(str(error.problem)):
                sentence += "; a text that begins with such a sign is put in quotes"
        else:
            sentence = _cycle(error) or _value_of_group(error) or _in_file(error)
            sentence = sentence or _known(str(error)) or _reason(error)
        raise ConfigError(sentence) from error


GROUPS = ("experiment",)  # groups whose name is no key of the schema
ELSEWHERE = {
    "lr": "schedule.base_lr",
    "learning_rate": "schedule.base_lr",
    "batch_size": "accumulation.global_batch",
    "accumulation_steps": "accumulation.steps",
    "accumulate_grad_batches": "accumulation.steps",
    "gradient_accumulation_steps": "accumulation.steps",
    "per_device_train_batch_size": "accumulation.micro_batch",
    "max_grad_norm": "train.clip_norm",
    "gradient_clip_val": "train.clip_norm",
    "max_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.updates",
    "num_workers": "train.loader_workers",
    "dataloader_num_workers": "train.loader_workers",
    "nproc_per_node": "cluster.ranks_per_node",
    "nnodes": "cluster.nodes",
    "num_nodes": "cluster.nodes",
    "data_dir": "job.data_dir",
    "output_dir": "run.dir",
}
"""Names that other tools have for our keys."""


def no_such_key(key: str) -> str:
    """Return a sentence about an unknown key, with the nearest one of any section.

    >>> no_such_key("accumulation.stpes")
    "there is no key 'accumulation.stpes'; did you mean 'steps'?"
    >>> no_such_key("epochs")
    "there is no key 'epochs'; did you mean 'train.epochs'?"
    """
    section, _, leaf = key.rpartition(".")
    usual = plain(Config())
    known = dict.fromkeys([*usual, *flat(usual), *GROUPS])
    siblings = [k.removeprefix(f"{section}.") for k in known if k.rpartition(".")[0] == section]
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    tail = did_you_mean(leaf, siblings)
    if leaf in ELSEWHERE:
        tail = did_you_mean(ELSEWHERE[leaf], [ELSEWHERE[leaf]])
    elif nearest(leaf, siblings) is None and elsewhere:
        tail = did_you_mean(elsewhere[0], elsewhere[:1])
    elif elsewhere and leaf not in siblings:
        tail = did_you_mean(elsewhere[0], elsewhere)
    return f"there is no key '{key}'{tail}"


def key_of_flag(flag: str) -> str | None:
    """Return the setting that a flag of another tool probably means; None for no known one.

    >>> key_of_flag("--epochs"), key_of_flag("--batch-size"), key_of_flag("--train.seed")
    ('train.epochs', 'accumulation.global_batch', 'train.seed')
    """
    name = flag.lstrip("-").replace("-", "_")
    keys = flat(plain(Config()))
    if name in keys:
        return name
    return ELSEWHERE.get(name) or next((k for k in keys if k.rpartition(".")[2] == name), None)


_KINDS = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}


def describe_conversion(key: str, reason: str) -> str | None:
    """Return a sentence about a value of the wrong kind, of OmegaConf's; None for another error.

    >>> describe_conversion(
    ...     "train.seed", "Value '1000.0' of type 'float' could not be converted to Integer"
    ... )
    'train.seed must be a whole number, but is 1000.0; try train.seed=1000'
    >>> describe_conversion("cluster.qos", "Cannot convert 'dict' to string: '{}'")
    'cluster.qos must be a text, but is {}; put a text in quotes'
    """
    for pattern, message in _OF_VALUES.items():
        if match := re.search(pattern, reason):
            return f"{key} {message.format(*match.groups(), key=key)}"
    match = re.match(r"Value '(.*?)' (?:of type '(\w+)' )?could not be converted to (\w+)", reason)
    if match is None or match[3] not in _KINDS:
        return None
    text = match[1] if match[2] in ("float", "int", "bool") else repr(match[1])
    hint = f"; try {key}={text[:-2]}" if re.fullmatch(r"-?\d+\.0", text) else ""
    return f"{key} must be {_KINDS[match[3]]}, but is {text}{hint}"


_OF_VALUES = {
    r"Cannot convert '\w+' to string: '(.*)'": ("must be a text, but is {0}; put a text in quotes"),
    r"is not Optional|Incompatible value 'None'|NoneType is not a subclass": (
        "cannot be null; leave it out, or put a text in quotes: 'null'"
    ),
    r"Incompatible key type 'NoneType'": "has null as a key; put a key in quotes: 'null'",
    r"Interpolation key '([^']+)' not found": (
        "refers to ${{{0}}}, but there is no key '{0}'; a text with a $ takes a backslash before it"
    ),
    r"ConfigError raised while resolving interpolation: (is \?\?\? in .+)": (
        "{0}, so it has to be set: {key}=VALUE"
    ),
    r"Environment variable '([^']+)' not found": (
        "refers to the environment variable {0}, which is not set; a default follows a comma, as "
        "in ${{oc.env:{0},VALUE}}"
    ),
    r"Unsupported interpolation type (\S+)": (
        "refers to ${{{0}:…}}, but nothing resolves '{0}'; a text with a $ takes a backslash "
        "before it"
    ),
}
"""Patterns of OmegaConf's errors about a value, and our sentences, which follow the key."""

_UNREADABLE = re.compile(
    r"LexerNoViableAlt|token recognition|mismatched input|extraneous input|no viable alternative"
)
"""Phrases of ANTLR's messages, which name its own rules, on a line that it cannot parse."""

# Patterns of Hydra's and OmegaConf's errors, and our messages for them.
MESSAGES = {
    r"Could not override '(\w+)'\.? No match": (
        "the primary configuration lists no {0} to choose; write +{0}=…, or begin its defaults "
        "with 'base'"
    ),
    r"Could not delete(?: from config\.)? '([^']+)'": (
        "there is nothing at '{0}' to delete; leave ~{0} out"
    ),
    r"Could not append to config. An item is already at '([^']+)'": (
        "'{0}' is there already: to change it, leave the + out, as in {0}=…"
    ),
    r"Multiple values for ([^ .]+)\.": (
        "'{0}' is chosen twice: on the line write {0}=… without +; in a file's defaults, after "
        "'base', write override {0}: …"
    ),
    r"(\S+) appears more than once in the final defaults list": (
        "{0} is listed twice: 'base' lists it, so a file after it writes override {0}: …"
    ),
    r"Cannot find primary config '([^']+)'": (
        "there is no primary configuration '{0}.yaml': --config-name takes the name of a file in "
        "the folder that --config-dir names"
    ),
    r"Ambiguous value for argument '([^'=]+)=(.*)'": (
        "{0}={1} holds commas: to sweep over its values add -m (in Python: start_sweep()), for a "
        "list write {0}=[{1}], for one text {0}=\"'{1}'\""
    ),
    r"Config group override must be a string or a list\. Got (\w+)": (
        "a group (cluster, experiment, job, optimizer or tracker) takes the name of a file, as in "
        "optimizer=adam, but one of them has a value of type {0}; leave it out, or name a file"
    ),
    r"Sweep parameters '([^']+)' requires --multirun": "{0} is for a sweep: add -m",
    r"BasicSweeper does not support sweep type": (
        "a sweep runs all of its points, so it takes values (a,b or range(1,9)), no interval; to "
        "choose points from one by what came of others, add sweep.search=tpe sweep.trials=20"
    ),
}


def _known(text: str) -> str | None:
    text = text.replace("'++", "'")  # of `to_hydra`, which was not typed
    for pattern, message in MESSAGES.items():
        if match := re.search(pattern, text):
            return message.format(*match.groups())
    if match := re.search(r"Could not override '([^']+)'", text):
        return no_such_key(match[1])
    if match := re.search(r"Could not (?:find|load) '([^']+?)(?:/([^'/]+))?'", text):
        group, choice = match.groups()
        if choice is None:
            return f"there is no configuration '{group}'"
        offered = re.findall(r"^\t(?!provider=)(\S+)$", text, flags=re.MULTILINE)
        return f"there is no {group} called '{choice}'{did_you_mean(choice, offered)}"
    return None


def _cycle(error: BaseException) -> str | None:
    """Return a sentence about files whose defaults include each other, if that is the error.

    Hydra follows them until the stack is full, and only its frames tell which files they are.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    paths = Counter(
        f.f_locals.get("path") for f in frames if f.f_code.co_name == "_create_defaults_tree_impl"
    )
    files = sorted(f"{path}.yaml" for path, count in paths.items() if path and count > 1)
    if not files or not isinstance(error, RecursionError):
        return None
    whom = "itself" if len(files) == 1 else "each other"
    return (
        f"the defaults of {' and '.join(files)} include {whom}; a file of your own that extends "
        f"another needs another name"
    )


def _value_of_group(error: BaseException) -> str | None:
    """Return a sentence about a file's `cluster: slurm`, which sets no section, if that is it."""
    match = re.match(
        r"In '([^']+)': [\s\S]*(?:is not a subclass of (\w+)Config\. value: (\S+)"
        r"|Cannot assign str to Dict)",
        f"{error}\n{error.__context__}",
    )
    if match is None:
        return None
    section = (match[2] or getattr(error.__context__, "full_key", None) or "GROUP").lower()
    choice = f"override {section}: {match[3] or 'NAME'}"
    return (
        f"{match[1]}.yaml: {section} is a section with keys; to choose a file of a group, write in "
        f"the file's defaults, after base: {choice}"
    )


def _in_file(error: BaseException) -> str | None:
    """Return a sentence about a wrong key or value in a configuration file, if that is the error.

    Hydra raises it while it handles OmegaConf's own error, and states the file in its text alone.
    """
    from hydra.errors import ConfigCompositionException  # workers read configurations without Hydra

    cause, match = error.__context__, re.match(r"In '([^']+)': ", str(error))
    if not (match and isinstance(error, ConfigCompositionException)):
        return None
    key = getattr(cause, "full_key", None)
    if not (key and isinstance(cause, OmegaConfBaseException)):
        return None
    file, group = f"{match[1]}.yaml", match[1].partition("/")[0]
    if isinstance(cause, ConfigKeyError) and key in GROUPS:
        return (
            f"{file} has to begin with the line # @package _global_; else its keys belong to {key}"
        )
    if isinstance(cause, ConfigKeyError):  # a file of a group states keys without the group
        sentence = no_such_key(key).replace(f"'{group}.", "'", 1)
        return f"{file}: {sentence}"
    reason, own_key = _first_lines(cause), key.removeprefix(f"{group}.")
    return f"{file}: {describe_conversion(own_key, reason) or f'{own_key}: {reason}'}"


def _first_lines(error: BaseException) -> str:
    return re.split(r"\n    full_key|\nSee https|\n?Config search path", str(error))[0].strip()


def _reason(error: BaseException) -> str:
    """Return the error's own first lines, with the key or the override that it is about."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    first = _first_lines(cause)
    if (override := getattr(error, "override", None)) is not None:
        first = re.sub(r"Error when parsing index: .*\n", "", first)  # from Hydra 1.4 on
        if name := re.search(r"Unknown function '([^']+)'", first):
            first = f"there is no function {name[1]}()"
        elif _UNREADABLE.search(first):
            first = "a quote or a bracket is not closed, or a letter needs quotes"
        typed = override.removeprefix("++")
        key, _, value = typed.partition("=")
        example = "KEY=\"'VALUE'\""
        if value and not re.search(r"""['"\\$,\[\]{}]""", value):
            example = f"{key}=\"'{value}'\""
        return (
            f"the command line cannot be read at {typed}: {first}; text with other letters than "
            f"a-z, 0-9 and ./_- is put in quotes, as in {example}"
        )
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return f"a configuration file is no YAML: {first}"
    key = getattr(cause, "full_key", None) or "the configuration cannot be read"
    if isinstance(plain(Config()).get(key), dict):
        return f"{key} is a section, whose keys are set one by one: {key}.NAME=VALUE"
    return describe_conversion(key, first) or f"{key}: {first or type(error).__name__}"
