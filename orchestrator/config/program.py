"""The `job` section of a training program that runs unchanged."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path, PurePath
from typing import Any

from orchestrator.config.changes import flat
from orchestrator.config.schema import non_default_values
from orchestrator.errors import ConfigError, did_you_mean
from orchestrator.plugins import PROGRAM_STYLES

CHOICES = {
    "argument_style": ("equals", "words", "bare"),
    "devices": ("node", "rank"),
    "stop_signal": ("TERM", "INT", "USR1", "USR2"),
}
KEYS = ("command", "arguments", "resume_arguments", "style", *CHOICES)
NEWEST = re.compile(r"\{newest:([^}]+)\}")
"""Placeholder in `resume_arguments`: the newest file that matches a pattern."""
INTERPRETER = re.compile(r"(?:python|pypy)[\d.]*|(?:ba|da|k|z)?sh")
CODE = re.compile(r"-[A-Za-z]*c")  # code follows, no script
OPTIONS_WITH_VALUE = ("-W", "-X", "-o")
"""Of Python and of shells: a word follows."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
MEANINGLESS = ("optimizer", "accumulation", "schedule", "train", "engine", "facts", "transport")
"""Sections that say how we train; a program trains by itself."""
RANK_STARTERS = ("torchrun", "accelerate", "deepspeed", "msrun", "srun", "mpirun", "mpiexec")
"""Programs that start ranks themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramConfig:
    """Program that each rank runs.

    Attributes:
        command: a script (train.py), a module (`-m`, `package.module`) or any other program, and
            the arguments that were typed after it.
        arguments: further ones by name, so that they can be swept.
        resume_arguments: words added from the second attempt on; `{newest:PATTERN}` in one is the
            newest file that matches.
        argument_style: `equals` is --lr=0.1, `words` --lr 0.1, `bare` lr=0.1.
        style: name of the program style (`config.launchers`) whose variables tell it its rank.
        devices: it sees all of its node, or its rank's own alone.
        stop_signal: what a stop becomes for it.
    """

    command: tuple[str, ...]
    # Not compared: facts from a program's files hold whatever its arguments.
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    resume_arguments: tuple[str, ...] = ()
    argument_style: str = "equals"
    style: str = "torch"
    devices: str = "node"
    stop_signal: str = "TERM"

    @property
    def is_module(self) -> bool:
        """Return True if Python runs a module: `-m package.module`."""
        return self.command[0] == "-m"

    @property
    def target(self) -> str:
        """The script, module or program."""
        return self.command[1] if self.is_module else self.command[0]

    @property
    def name(self) -> str:
        """For a run's folder, and the scheduler: of a script, also after `python` or `bash`.

        >>> ProgramConfig(command=("scripts/train.py",)).name
        'train'
        >>> ProgramConfig(command=("-m", "a.b")).name
        'b'
        >>> ProgramConfig(command=("python", "-u", "x.py")).name
        'x'
        """
        words = self.command
        if INTERPRETER.fullmatch(PurePath(words[0]).name):
            words = _interpreted(words[1:]) or words
        is_module = words[0] == "-m"
        target = words[1] if is_module else words[0]
        last = target.rpartition(".")[2] if is_module else PurePath(target).stem
        return (last.strip(".") or PurePath(self.target).name).lower()

    @property
    def argv(self) -> tuple[str, ...]:
        """All that follows the target.

        >>> ProgramConfig(command=("train.py", "--tiny"), arguments={"optim": {"beta": 0.9}}).argv
        ('--tiny', '--optim.beta=0.9')
        """
        typed = self.command[2 if self.is_module else 1 :]
        return (*typed, *render(self.arguments, self.argument_style))


def _interpreted(words: Sequence[str]) -> Sequence[str]:
    """Return an interpreter's arguments from its script, or its `-m`, on; none if it has neither.

    >>> _interpreted(["-W", "ignore", "-u", "x.py", "--lr"]), _interpreted(["-c", "print()"])
    (['x.py', '--lr'], [])
    >>> _interpreted(["-euo", "pipefail", "train.sh"])
    ['train.sh']
    """
    rest = iter(range(len(words)))
    for index in rest:
        word = words[index]
        if CODE.fullmatch(word):
            break
        if not word.startswith(("-", "+")) or (word == "-m" and index + 1 < len(words)):
            return words[index:]
        if word in OPTIONS_WITH_VALUE or re.fullmatch(r"[-+][a-z]*o", word):  # bash's -euo pipefail
            next(rest, None)
    return []


def with_newest_files(argv: Sequence[str]) -> list[str]:
    """Return the arguments with each `{newest:PATTERN}` replaced; none if no file matches one.

    A pattern is as in a shell, from the working directory.
    """
    arguments: list[str] = []
    for argument in argv:
        text = argument
        if pattern := NEWEST.search(argument):
            files = glob.glob(pattern[1], recursive=True)  # noqa: PTH207  # as people type it
            if not files:
                return []
            newest = max(files, key=lambda name: Path(name).stat().st_mtime)
            text = argument.replace(pattern[0], newest)
        arguments.append(text)
    return arguments


def is_program(job: Mapping[str, Any]) -> bool:
    """Return True if a `job` section names a program instead of a class."""
    return job.get("_target_") is None and "command" in job


def short_name(job: Mapping[str, Any]) -> str:
    """Return the default name of a run: its class's or its program's.

    >>> short_name({"_target_": "jobs.digits.Digits"}), short_name({"command": ["a/train.py"]})
    ('digits', 'train')
    """
    if is_program(job):
        return program_of(job).name
    return str(job["_target_"]).rpartition(".")[2].lower()


def target_of(job: Mapping[str, Any]) -> str | ProgramConfig:
    """Return the class, by its dotted name, or the program that a section names."""
    return program_of(job) if is_program(job) else str(job["_target_"])


def program_of(job: Mapping[str, Any]) -> ProgramConfig:
    """Return the program of a valid section."""
    values: dict[str, Any] = {key: job[key] for key in KEYS if job.get(key) is not None}
    for key in {"command", "resume_arguments"} & values.keys():
        values[key] = tuple(map(str, job[key]))
    return ProgramConfig(**values)


def render(arguments: Mapping[str, Any], style: str) -> Iterator[str]:
    """Yield arguments as a command line has them; see `ProgramConfig.argument_style`.

    A name in a name has a dot (`optim.lr`). true is the name alone and false is nothing, but in
    bare style `name=true`; null is nothing. Raises `ConfigError` for what has no such form.

    >>> list(render({"lr": 0.1, "fp16": True, "tiny": False}, "words"))
    ['--lr', '0.1', '--fp16']
    >>> list(render({"layers": [1, 2]}, "words")), list(render({"on": True}, "bare"))
    (['--layers', '1', '2'], ['on=true'])
    """
    bare = style == "bare"
    for name, value in flat(arguments).items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"job.arguments.{name} is no name of an argument: leave its dashes out, as in "
                f"job.arguments.{name.lstrip('-') or 'lr'}=VALUE"
            )
        if value == {}:
            raise ConfigError(
                f"job.arguments.{name} is an empty table, which has no form as an argument: leave "
                f"it out, or give job.arguments.{name}=VALUE (null: no argument)"
            )
        if value is None or (value is False and not bare):
            continue
        if value is True and not bare:
            yield f"--{name}"
        elif isinstance(value, list) and style == "words":
            yield f"--{name}"
            yield from map(_text, value)
        elif isinstance(value, list):
            raise ConfigError(
                f"job.arguments.{name}={value} is a list, which has no form as "
                f"{'' if bare else '--'}{name}=…; try job.argument_style=words (--{name} "
                f"{' '.join(map(_text, value))}), or write the words after --"
            )
        elif style == "words":
            yield from (f"--{name}", _text(value))
        else:
            yield f"{'' if bare else '--'}{name}={_text(value)}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def program_problems(config: Any) -> list[str]:
    """Return the errors of a program's section, and of keys that mean nothing to a program.

    Args:
        config: a whole `Config`.
    """
    job: Mapping[str, Any] = config.job
    wrong = [
        f"there is no key 'job.{key}' for a program{did_you_mean(str(key), KEYS)}; what it is to "
        f"get belongs to job.arguments.{key}"
        for key in job
        if key not in (*KEYS, "_target_")
    ]
    wrong += _wrong_command(job["command"])
    if job.get("style") is not None and (refusal := PROGRAM_STYLES.refusal(str(job["style"]))):
        wrong.append(refusal)
    for key, allowed in CHOICES.items():
        if job.get(key) is not None and job[key] not in allowed:
            wrong.append(f"job.{key} must be one of {', '.join(allowed)}, but is {job[key]!r}")
    resume: Any = job.get("resume_arguments") or []
    if not isinstance(resume, list) or any(isinstance(w, Mapping | list) for w in resume):
        wrong.append(
            f"job.resume_arguments must be a list of words, as in "
            f"[--resume,'{{newest:*.pt}}'], but is {resume!r}"
        )
    arguments = job.get("arguments")
    if arguments is not None and not isinstance(arguments, Mapping):
        wrong.append(f"job.arguments must be names with values, but is {arguments!r}")
    if not wrong:
        try:
            _ = program_of(job).argv
        except ConfigError as error:
            wrong.append(str(error))
    in_vain: list[str] = []  # keys about our training that are not at their defaults
    for section, value in non_default_values(config, MEANINGLESS).items():
        if is_dataclass(value):
            in_vain += [
                f"{section}.{key}={inner}" for key, inner in non_default_values(value).items()
            ]
        else:
            in_vain.append(f"{section}={value}" if isinstance(value, str) else section)
    return wrong + [
        f"{key} means nothing to a program, which trains by itself; what the program "
        f"needs belongs to job.arguments, or after --"
        for key in in_vain
    ]


def _wrong_command(command: Any) -> Iterator[str]:
    """Yield the error in a command, if there is one."""
    if not isinstance(command, list) or not command:
        as_in = "the program and its arguments, as in job.command=[train.py]"
        yield f"job.command must be a list, {as_in}, but is {command!r}"
        return
    argv: list[Any] = command
    first = str(argv[0])
    if wrong := [a for a in argv if isinstance(a, Mapping | list) or a is None]:
        yield f"job.command must hold words, but holds {wrong[0]!r}"
    elif first == "-m":
        if len(argv) == 1:
            yield "job.command=[-m] names no module; write -m package.module"
    elif not first or first.startswith("-"):
        yield (
            f"job.command must begin with a program, a script or -m, but begins with '{first}'; "
            "python's own options are not passed on: leave them out, and put code of -c in a script"
        )
    elif "=" in first:
        yield f"there is no program {first}; KEY=VALUE of ours comes before --"
    elif (starter := PurePath(first).name) in RANK_STARTERS:
        yield (
            f"{starter} starts ranks itself, and would do so in each of ours; name the script "
            f"alone: python -m orchestrator run cluster.nodes=2 -- train.py"
        )
