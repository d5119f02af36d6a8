"""Parser for the arguments of `orchestrator.launch`."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, cast

from orchestrator.config.job_source import is_this_python
from orchestrator.config.messages import key_of_flag
from orchestrator.config.schema import FREE_SECTIONS, FREE_TABLES
from orchestrator.config.typed_text import quote_text
from orchestrator.errors import ConfigError, did_you_mean, expand_user, nearest, shortened
from orchestrator.plugins import COMMANDS

CLASS_NAME = re.compile(r"(?:[A-Za-z_]\w*\.)+[A-Z]\w*")
NAME = re.compile(r"[A-Za-z_][\w-]*")
PRIMARY = "config"
"""The primary configuration's name, unless `--config-name` says another."""

VERBS = (
    "launch",
    "run",
    "plan",
    "resume",
    "new",
    "status",
    "attach",
    "wait",
    "logs",
    "cancel",
    "compare",
    "export",
    "doctor",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """Parsed command line.

    Attributes:
        overrides: as they were typed.
        config_dir: a folder of the user's own configuration; its files win over the shipped ones.
        config_name: of the primary configuration.
        multirun: whether a sweep is asked for by -m. A configuration may ask for one, too.
        changed: finished points of a sweep run again if their code or data has changed.
        cfg: what `--cfg` shows: "job".
    """

    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    config_name: str = PRIMARY
    multirun: bool = False
    changed: bool = False
    verbose: bool = False
    quiet: bool = False
    help: bool = False
    cfg: str | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags that choose the configuration's files, from any folder."""
        folder = self.config_dir and str(expand_user(self.config_dir).absolute())
        name = None if self.config_name == PRIMARY else self.config_name
        values = {"--config-dir": folder, "--config-name": name}
        return tuple(item for flag, value in values.items() if value for item in (flag, value))


SWITCHES = {
    "-m": "multirun",
    "--multirun": "multirun",
    "-v": "verbose",
    "--verbose": "verbose",
    "-q": "quiet",
    "--quiet": "quiet",
    "-h": "help",
    "--help": "help",
    "-r": "",
    "--run": "",
    "--changed": "changed",
}
VALUED = {
    "-cd": "config_dir",
    "--config-dir": "config_dir",
    "-cn": "config_name",
    "--config-name": "config_name",
    "-c": "cfg",
    "--cfg": "cfg",
}
REFUSED = {
    "--config-path": "would take the shipped configuration away; --config-dir FOLDER is searched "
    "before it",
    "-cp": "would take the shipped configuration away; --config-dir FOLDER is searched before it",
    "--experimental-rerun": "would run what a file pickles; python -m orchestrator resume RUN goes "
    "on with a run",
}


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Sort flags from overrides.

    Raises:
        ConfigError: an unknown flag, one without its value, an argument that is no override.
    """
    options: dict[str, Any] = {}
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            overrides += program_overrides(rest, before=overrides)
            break
        flag, equals, value = argument.partition("=")
        if not argument.startswith("-") or argument == "-":
            overrides.append(argument)
        elif flag in REFUSED:
            raise ConfigError(f"{flag} is not available: it {REFUSED[flag]}")
        elif argument in SWITCHES:
            options[SWITCHES[argument]] = True
        elif flag in VALUED:
            if not equals and not rest:
                raise ConfigError(f"{flag} needs a value: {flag} {VALUED[flag].upper()}")
            options[VALUED[flag]] = value if equals else rest.pop(0)
        else:
            check_overrides(overrides, line=arguments)  # it may be the flag of a script before it
            known = [*SWITCHES, *VALUED]
            if key := key_of_flag(flag):
                typed = value if equals else rest[0] if rest and "=" not in rest[0] else "VALUE"
                raise ConfigError(
                    f"there is no flag '{flag}'; settings are written without dashes: {key}={typed}"
                )
            raise ConfigError(f"there is no flag '{flag}'{did_you_mean(flag, known)}")
    options.pop("", None)
    line = CommandLine(overrides=tuple(overrides), **options)
    if line.cfg not in (None, "job"):
        raise ConfigError(f"--cfg must be job, but is '{line.cfg}'")
    if line.multirun and line.cfg:
        raise ConfigError("--cfg shows one configuration; leave -m out, and sweep over no key")
    check_overrides(line.overrides, line=arguments)
    return line


LENGTHS = ("train.updates", "train.epochs", "train.samples")


def check_overrides(
    overrides: Sequence[str],
    *,
    verb: str = "run",
    line: Sequence[str] | None = None,
    options: Collection[str] = (),
) -> None:
    """Raise `ConfigError` for any text that is no override: KEY=VALUE, +KEY=VALUE, ++…, or ~KEY.

    Two lengths of the run are refused, too: one of them would have no effect.

    Args:
        verb, line: what was typed, for the advice on a program without `--`: the verb, and all
            arguments where they are more than the overrides.
        options: of the verb.
    """
    lengths: dict[str, str] = {}
    for override in overrides:
        if (key := key_of(override)) in LENGTHS:
            lengths[key] = override
        if override.startswith("-") and override != "-":
            flag = override.partition("=")[0]
            advice = f"; python -m orchestrator {verb} --help lists those that it has"
            if key := key_of_flag(flag):
                value = override.partition("=")[2] or "VALUE"
                advice = f"; settings are written without dashes: {key}={value}"
            elif nearest(flag, options):
                advice = did_you_mean(flag, options)
            raise ConfigError(f"{verb} has no option '{flag}'{advice}")
        if "=" in override or override.startswith("~"):
            continue
        if override in VERBS or override in COMMANDS.ours:
            way = f"a verb follows python -m orchestrator: python -m orchestrator {override}"
        elif verb == "resume":
            way = (
                "resume starts the same program or job with the same words again, and takes "
                "settings of the run alone; for other words start a new run"
            )
        elif override.endswith((".yaml", ".yml")):
            file = shlex.quote(str(Path(override).parent)), shlex.quote(Path(override).stem)
            way = "a configuration is named by --config-dir {} --config-name {}".format(*file)
        elif override.endswith((".py", ".sh")) or shutil.which(override) or _is_file(override):
            typed = [word for word in line or overrides if word != "--"]
            typed.insert(typed.index(override), "--")
            way = (
                f"a program comes after --, and its arguments after it: python -m orchestrator "
                f"{verb} {shlex.join(typed)}"
            )
        elif CLASS_NAME.fullmatch(override):
            way = f"the class of a job is named as in job._target_={override}"
        else:
            way = f"a choice is written as in job=digits, a value as in {override}=VALUE"
        raise ConfigError(f"'{override}' is not KEY=VALUE: {way}")
    lengths = {key: text for key, text in lengths.items() if not text.endswith("=null")}
    if len(lengths) > 1:
        raise ConfigError(
            f"{' and '.join(lengths.values())} are two lengths of the run; leave one of them out"
        )


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # longer than a name can be
        return False


def program_overrides(argv: Sequence[str], before: Sequence[str] = ()) -> tuple[str, str]:
    r"""Return the arguments after `--`, a program and its arguments, as overrides.

    Args:
        before: the overrides before `--`.

    Raises:
        ConfigError: there is no program, or an override names another one.

    >>> program_overrides(["train.py", "--lr", "it's"])
    ('job=program', "job.command=['train.py','--lr','it\\'s']")
    """
    check_overrides(before)
    command = without_python(argv)
    if not command:
        raise ConfigError(
            "after -- comes the program to run, as in -- train.py --lr 0.1; launch starts a job"
        )
    for override in before:
        if key_of(override) == "job.command" or (
            key_of(override) == "job" and override.partition("=")[2] != "program"
        ):
            raise ConfigError(f"{override} says what to run, and so does -- …; leave one out")
    return "job=program", f"job.command=[{','.join(map(quote_for_hydra, command))}]"


def without_python(argv: Sequence[str]) -> list[str]:
    """Return a command line without `python` or `python -u`, as we start scripts anyway."""
    if argv and is_this_python(argv[0]):
        return [*argv[2 if argv[1:2] == ["-u"] else 1 :]]
    return [*argv]


def quote_for_hydra(argument: str) -> str:
    """Quote an argument for Hydra, without escapes or interpolation."""
    escaped = escape_interpolations(argument)
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), escaped)
    return f"'{escaped}'"


def overrides_of(key: str, value: Any) -> list[str]:
    r"""Return overrides that give a key this very value: texts are not interpolated.

    Args:
        value: None, a boolean, a number, a text, a path, or a list or mapping of such; of a mapping
            each key is an override of its own, and keys that it does not name keep their values.

    Raises:
        ConfigError: a value of another type.

    >>> overrides_of("job", {"samples": 500, "layers": [8, None], "name": "it's ${x}"})
    ['job.samples=500', 'job.layers=[8,null]', "job.name='it\\'s \\${x}'"]
    """
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[Any, Any]] = cast("Mapping[Any, Any]", value).items()
        for name, _ in items:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigError(f"{key} has the key {name!r}, which is no name of a setting")
        return [text for name, item in items for text in overrides_of(f"{key}.{name}", item)]
    return [f"{key}={_as_hydra(key, value)}"]


UNQUOTED = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[A-Za-z_~./][\w./:@%+-]*", re.IGNORECASE)
"""Texts that Hydra reads as they are."""


def typed_setting(key: str, value: Any) -> str:
    r"""Return the override, or overrides, of `overrides_of` as they are typed in a shell.

    >>> print(typed_setting("train.initial_weights", "/a/run"), typed_setting("job.samples", 4))
    train.initial_weights=/a/run job.samples=4
    >>> print(typed_setting("job.path", "/my data"))
    'job.path='"'"'/my data'"'"''
    """
    plain = isinstance(value, str | PurePath) and UNQUOTED.fullmatch(str(value))
    texts = [f"{key}={value}"] if plain else overrides_of(key, value)
    return " ".join(map(shlex.quote, texts))


def _as_hydra(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(int(value) if isinstance(value, int) else float(value))  # of NumPy's float64
    if isinstance(value, str | PurePath):
        return quote_for_hydra(str(value))
    if isinstance(value, list | tuple):
        items: Sequence[Any] = cast("Sequence[Any]", value)
        return f"[{','.join(_as_hydra(key, item) for item in items)}]"
    if isinstance(value, Mapping):
        table: Mapping[Any, Any] = cast("Mapping[Any, Any]", value)
        return f"{{{','.join(f'{name}:{_as_hydra(key, item)}' for name, item in table.items())}}}"
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of NumPy or torch
        return _as_hydra(key, value.item())
    raise ConfigError(
        f"{key}={shortened(repr(value))} is of type {type(value).__name__}, but a setting is a "
        "number, a text, a list or a mapping of these, since every rank reads it from a file: pass "
        "what it is made from, and make it where it is used, as in the job's constructor"
    )


def escape_interpolations(text: str) -> str:
    """Return a text that OmegaConf reads literally, with `${` as two letters."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def key_of(override: str) -> str:
    """Return the key of an override, without its prefix.

    >>> key_of("++job.width=3"), key_of("~optimizer")
    ('job.width', 'optimizer')
    """
    return override.split("=", 1)[0].lstrip("+~")


# Values of SLURM's own notations, in which a comma or a bracket is not Hydra's.
SCHEDULER_OPTIONS = re.compile(
    r"cluster\.(?:partition|account|qos|constraint|exclude|gpus_per_node|interface"
    r"|slurm_flags\.[^=]+|srun_flags\.[^=]+)=([^'\"{$\s][^'\"$]*)"
)


def to_hydra(override: str, *, sweep: bool = False) -> str:
    """Translate an override as people type it into Hydra's grammar.

    `+cluster=slurm` means `cluster=slurm`. Keys of `FREE_TABLES` need no `+`.
    A value that begins with `~/` is quoted, for Hydra's grammar has no such letter; so are lists of
    partitions and nodes as the scheduler writes them, unless a comma is that of a sweep.

    >>> to_hydra("cluster.partition=long,short"), to_hydra("cluster.partition=long")
    ("cluster.partition='long,short'", 'cluster.partition=long')
    >>> to_hydra("cluster.constraint=[a|b]")
    "cluster.constraint='[a|b]'"
    >>> to_hydra("+cluster=slurm"), to_hydra("job.width=3"), to_hydra("job.data_dir=~/mnist")
    ('cluster=slurm', '++job.width=3', "++job.data_dir='~/mnist'")
    >>> to_hydra("cluster.slurm_flags.gres=gpu:8"), to_hydra("cluster.environment={A: b}")
    ('++cluster.slurm_flags.gres=gpu:8', '++cluster.environment={A: b}')
    """
    key, equals, value = override.partition("=")
    bare = key.lstrip("+")
    if not equals or bare.startswith("~"):
        return override
    if bare in FREE_SECTIONS and value == "null":
        return f"~{bare}"  # Hydra's way to choose none of a group
    value = quote_text(bare, value)
    match = None if sweep else SCHEDULER_OPTIONS.fullmatch(f"{bare}={value}")
    value = f"'{value}'" if match and set(value) & set(",[]|&()*") else _quoted_home(value)
    if bare.startswith(tuple(f"{table}." for table in FREE_TABLES)) or (
        bare in FREE_TABLES and value.lstrip().startswith("{")
    ):
        return f"++{bare}={value}"
    return f"{'' if bare == 'cluster' else key[: len(key) - len(bare)]}{bare}={value}"


def _quoted_home(value: str) -> str:
    if "'" in value or '"' in value:
        return value
    return re.sub(r"(^|[,\[{:]\s*)(~[^,\[\]{}()\s\\]*)", r"\1'\2'", value)
