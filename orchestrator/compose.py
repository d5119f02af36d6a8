"""From a command line to a checked `Config`: Hydra's composition, and its errors put into words.

One place knows Hydra's ways: the schema's registration, the spellings we accept beside Hydra's own,
and what its exceptions mean for the person who typed the overrides.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config import FREE_SECTIONS, Config, read_config, unknown_keys
from orchestrator.errors import ConfigError, did_you_mean
from orchestrator.hydra_input import check_arguments, guarded, register_checked_files

HYDRA_VERSION_BASE = "1.3"
GROUPS = ("experiment",)  # groups whose name is no key of the schema
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException)


def dense_parameters(layers: Sequence[int]) -> int:
    """Numbers in the weights and biases of dense layers of these sizes.

    >>> dense_parameters([2, 3, 1])
    13
    """
    return sum(a * b + b for a, b in itertools.pairwise(layers))


def transformer_parameters(width: int, layers: int, context: int, tokens: int = 256) -> int:
    """Numbers in a transformer with biases, tied embeddings and learned places.

    >>> transformer_parameters(64, 2, 128)
    124672
    """
    return width * (tokens + context + 2) + layers * (12 * width**2 + 13 * width)


def sum_of(*numbers: int) -> int:
    """The sum (OmegaConf has no arithmetic of its own).

    >>> sum_of(1, 2, 4)
    7
    """
    return sum(numbers)


def when_null(value: Any, then: Any, otherwise: Any) -> Any:
    """`then` where a key is null, else `otherwise` (OmegaConf has no conditional of its own)."""
    return then if value is None else otherwise


def register() -> None:
    """Make the schema and the resolvers known to Hydra. May be called twice."""
    ConfigStore.instance().store(name="schema", node=Config)
    register_checked_files(config_folder())
    for resolver in (dense_parameters, transformer_parameters, sum_of, when_null):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def config_folder() -> Path:
    """The folder with the shipped configuration: in an installed wheel, or beside the package."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise ConfigError(
        f"the shipped configuration is missing: there is no conf/config.yaml in {package}"
    )


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


# Values of SLURM's own notations, in which a comma or a bracket is not Hydra's.
SCHEDULERS_WORDS = re.compile(
    r"(\+{0,2}cluster\.(?:partition|account|qos|constraint|exclude|reservation|gpus_per_node|interface"
    r"|slurm_flags\.[^=]+|srun_flags\.[^=]+))=([^'\"\[{$\s][^'\"$]*)"
)


def _as_the_scheduler_writes(argument: str) -> str:
    """Quote a value such as `gpu[1-3],gpu7`, so that Hydra takes it for one text.

    >>> _as_the_scheduler_writes("cluster.partition=long,short")
    "cluster.partition='long,short'"
    >>> _as_the_scheduler_writes("cluster.partition=long")
    'cluster.partition=long'
    """
    found = SCHEDULERS_WORDS.fullmatch(argument)
    if found is None or not set(found[2]) & set(",[]|&()*"):
        return argument
    return f"{found[1]}='{found[2]}'"


def accept_spellings(arguments: Sequence[str]) -> list[str]:
    """Rewrite what people type into what Hydra takes.

    `cluster=slurm` means `+cluster=slurm` (the group is absent from the defaults); with an own
    `job._target_` its arguments need no `+`; a sweep's `run.dir` is where its points are gathered;
    outside of sweeps a comma in a partition's or a node's list is the scheduler's.

    >>> accept_spellings(["cluster=slurm", "job._target_=a.B", "job.width=3"])
    ['+cluster=slurm', 'job._target_=a.B', '++job.width=3']
    """
    own_job = any(_key(a) == "job._target_" for a in arguments)
    own_primary = any(
        a in {"-cn", "--config-name"} or a.startswith("--config-name=") for a in arguments
    )
    sweep = any(a in {"-m", "--multirun"} for a in arguments)
    result: list[str] = []
    for argument in arguments:
        if argument.startswith("cluster=") and not own_primary:
            result.append("+" + argument)
        elif own_job and argument.startswith("job.") and _key(argument) != "job._target_":
            result.append("++" + argument)
        else:
            # A sweep's commas are Hydra's.
            result.append(argument if sweep else _as_the_scheduler_writes(argument))
            if sweep and _key(argument) == "run.dir":
                result.append("hydra.sweep.dir=" + argument.split("=", 1)[1])
    return result


def _forget_the_default_job(composed: DictConfig, stated: set[str]) -> None:
    """With somebody's own `job._target_`, what conf/job/digits.yaml sets is not meant for it."""
    for key in list(composed.job):
        if f"job.{key}" not in stated:
            OmegaConf.set_struct(composed.job, value=False)
            del composed.job[key]
    for dotted in ("facts.parameters", "facts.dataset_samples", "train.epochs"):
        if dotted not in stated:
            OmegaConf.update(composed, dotted, None)


def to_config(composed: DictConfig, overrides: Iterable[str]) -> Config:
    """Check a composed configuration against the schema and the rules; give it as a `Config`.

    Raises:
        ConfigError: unknown keys, wrong types, values that cannot be used.
    """
    stated = {_key(override) for override in overrides}
    if "job._target_" in stated:
        _forget_the_default_job(composed, stated)
    with guarded():
        values = OmegaConf.to_container(composed, resolve=True)
        sentences = unknown_keys(values)  # type: ignore[arg-type]
        if sentences:
            raise ConfigError("\n".join(sentences))
        return read_config(values)


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed configuration, not yet checked; whether it asks for a sweep by itself."""

    values: DictConfig
    overrides: list[str]
    sweeps: bool


def composed(overrides: Sequence[str], config_dir: str | None = None) -> Composed:
    """Compose without Hydra's application, which composes twice.

    Args:
        overrides: as on the command line of `orchestrator.launch`.
        config_dir: a folder of the user's own configs, searched beside the shipped ones.

    Raises:
        ConfigError: what cannot be composed, in words.
    """
    import hydra
    from hydra.types import RunMode

    check_arguments(overrides)
    register()
    overrides = accept_spellings(overrides)
    searched: list[str] = []
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir must be a folder, but {config_dir} is not one")
        searched = [f"hydra.searchpath=[file://{folder}]"]
    with (
        guarded(),
        hydra.initialize_config_dir(str(config_folder()), version_base=HYDRA_VERSION_BASE),
    ):
        values = hydra.compose(
            "config", overrides=[*overrides, *searched], return_hydra_config=True
        )
    sweeps = OmegaConf.select(values, "hydra.mode") == RunMode.MULTIRUN
    with open_dict(values):
        del values["hydra"]
    return Composed(values, overrides, sweeps)


def compose(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """Compose and check: for verbs that only look. Raises `ConfigError`."""
    found = composed(overrides, config_dir)
    return to_config(found.values, found.overrides)


def _known_keys(dotted: str) -> list[str]:
    node: Any = Config()
    for part in dotted.split(".")[:-1]:
        node = getattr(node, part, None)
    return list(vars(node)) if node is not None and hasattr(node, "__dict__") else []


def explained(error: BaseException) -> ConfigError:
    """Put an exception of Hydra or OmegaConf into one clear message."""
    text = str(error)
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1)
        section = key.split(".")[0]
        if section in FREE_SECTIONS and "." in key:
            return ConfigError(
                f"the chosen {section} has no key '{key}'; to add it all the same, write +{key}=…"
            )
        known = _known_keys(key) if "." in key else [*_known_keys(key), *GROUPS]
        return ConfigError(f"there is no key '{key}'{did_you_mean(key.split('.')[-1], known)}")
    if found := re.search(r"Could not find '([^']+)/([^']+)'", text):
        group, choice = found.groups()
        offered = re.findall(r"^\t(?!provider=)(\S+)$", text, flags=re.MULTILINE)
        return ConfigError(f"there is no {group} called '{choice}'{did_you_mean(choice, offered)}")
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    first = (
        str(cause)
        .split("\n    full_key", maxsplit=1)[0]
        .split("\nSee https", maxsplit=1)[0]
        .strip()
    )
    return ConfigError(f"{key}: {first}" if key else f"the command line cannot be read: {first}")


def user_path(path: str) -> Path:
    """A path as the user meant it: `~` expanded, relative to where they stand."""
    return Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100  # no symlink is followed
