"""Plug-ins that are chosen by name: clusters, transports, frameworks, program styles,
trackers, searches, callbacks and commands.

Built-in ones are in a table as "module:Class", so that only the chosen one is imported; one whose
module is missing (an add-on that was taken away) is left out. A third party's is an entry point of
an installed package, which is searched when a name is not built in:

    [project.entry-points."orchestrator.clusters"]
    ssh = "my_package.cluster:SshCluster"
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.errors import ConfigError, OrchestratorError, nearest, shortened

Base = TypeVar("Base")
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginKind:
    """A kind of plug-in.

    Attributes:
        key: of the configuration, where one is chosen.
        group: of entry points.
        ours: name: "module:Class".
        besides: names that are no class: `auto`, say.
    """

    key: str
    group: str
    ours: Mapping[str, str]
    besides: tuple[str, ...] = ()

    def refusal(self, name: str) -> str | None:
        """Return why `name` cannot be chosen, in a sentence; None if it can. Imports nothing."""
        if name in self.ours:
            return self._missing(name)
        if name in self.besides:
            return None
        theirs = _entry_points(self.group)
        registered = [entry for entry in theirs if entry.name == name]
        if len(registered) > 1:
            packages = " and ".join(sorted(_package(entry) for entry in registered))
            return f"{self.key}={name} is registered by {packages}; uninstall all of them but one"
        if registered:
            return None
        known = list(dict.fromkeys([*self.besides, *self.ours, *(e.name for e in theirs)]))
        meant = nearest(str(name), known)
        end = (
            f"; did you mean '{meant}'?"
            if meant
            else f"; another one comes with a package that registers it in {self.group}, which is "
            f"then installed here and where ranks run"
        )
        return f"{self.key} must be one of {', '.join(known)}, but is {shortened(name)!r}{end}"

    def load(self, name: str, base: type[Base]) -> type[Base]:
        """Return the class that `name` names, a `base`.

        Raises:
            ConfigError: no plug-in has that name, or its package cannot provide it.
        """
        if name in self.besides:
            raise ConfigError(f"{self.key}={name} names no class; known are {', '.join(self.ours)}")
        plugin, source = self._load(name)
        if source is None:
            return plugin
        if not (isinstance(plugin, type) and issubclass(plugin, base)):
            raise ConfigError(f"{source} is no subclass of {base.__module__}.{base.__qualname__}")
        if lacking := sorted(getattr(plugin, "__abstractmethods__", ())):
            raise ConfigError(f"{source} has no {' and no '.join(lacking)}")
        return plugin

    def load_function(self, name: str) -> Callable[..., Any]:
        """Return the function that `name` names.

        Raises:
            ConfigError: no plug-in has that name, or its package cannot provide it.
        """
        plugin, source = self._load(name)
        if not callable(plugin):
            raise ConfigError(f"{source or name} is no function")
        return plugin

    def _load(self, name: str) -> tuple[Any, str | None]:
        """Return what `name` names, and how to call a third party's in messages; None for ours."""
        where = self.ours.get(name)
        if where is not None:
            if sentence := self._missing(name):
                raise ConfigError(sentence)
            return imported(where), None
        if sentence := self.refusal(name):
            raise ConfigError(sentence)
        entry = next(entry for entry in _entry_points(self.group) if entry.name == name)
        source = f"{self.key}={name}: {entry.value} of {_package(entry)}"
        try:
            return imported(entry.value), source
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{source} cannot be imported: {_describe(error)}") from error

    def _missing(self, name: str) -> str | None:
        """Return that one of ours was taken away, in a sentence; None if it is there."""
        if _is_there(self.ours[name]):
            return None
        missing = _missing_path(self.ours[name])
        return f"{self.key}={name} is not part of this installation: {missing} is missing"

    def names(self) -> list[str]:
        """Return the names of all plug-ins that are there: ours, then those of other packages."""
        own = [name for name, where in self.ours.items() if _is_there(where)]
        return [*dict.fromkeys([*own, *(entry.name for entry in _entry_points(self.group))])]

    def make(self, name: str, base: type[Base], *arguments: Any) -> Base:
        """Return an object of the class that `name` names. Raises `ConfigError`."""
        chosen: Any = self.load(name, base)
        with self.wrap_errors(name, "at its start"):
            return chosen(*arguments)

    @contextlib.contextmanager
    def wrap_errors(self, name: str, doing: str) -> Generator[None]:
        """Turn any error of a third party's class into one sentence that names its package.

        Raises:
            ConfigError: it raised another package's error. In a built-in class that is a defect,
                which keeps its traceback.
        """
        try:
            yield
        except OrchestratorError:
            raise
        except Exception as error:
            if name in self.ours:
                raise
            entry = next(entry for entry in _entry_points(self.group) if entry.name == name)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"{self.key}={name}: {entry.value} of {_package(entry)} failed {doing}: "
                f"{_describe(error)} ({frame.filename}, line {frame.lineno})"
            ) from error


OBSERVER = "TRAINING_OBSERVER"
"""A variable of the environment: "module:name" of a function of the rank that returns a context
manager, which every rank of a job class enters before it imports the job. A program gets no
variable that begins with ORCHESTRATOR_, so this does not."""
CLUSTERS = PluginKind(
    key="cluster.kind",
    group="orchestrator.clusters",
    ours={
        "local": "orchestrator.clusters.local.cluster:LocalCluster",
        "slurm": "orchestrator.clusters.slurm.cluster:SlurmCluster",
    },
)
TRANSPORTS = PluginKind(
    key="transport",
    group="orchestrator.transports",
    ours={
        # MindSpore's own, as is its code for nccl and hccl; torch refuses it.
        "mccl": "orchestrator.engine.mindspore.group:MindSporeGroup",
        "gloo": "orchestrator.engine.torch.transports:Gloo",
        "nccl": "orchestrator.engine.torch.transports:Nccl",
        "hccl": "orchestrator.engine.torch.transports:Hccl",
    },
    besides=("auto",),
)
FRAMEWORKS = PluginKind(
    key="framework",
    group="orchestrator.frameworks",
    ours={
        "torch": "orchestrator.engine.torch.framework:Torch",
        "mindspore": "orchestrator.engine.mindspore.framework:MindSpore",
    },
)
FRAMEWORK_FACTS = PluginKind(
    key="framework",
    group="orchestrator.framework_facts",
    ours={
        "torch": "orchestrator.config.rules:TorchFacts",
        "mindspore": "orchestrator.engine.mindspore.facts:MindSporeFacts",
    },
)
"""Facts about a framework that submitting needs, by the framework's name. Their import is cheap."""
PROGRAM_STYLES = PluginKind(
    key="job.style",
    group="orchestrator.launchers",
    ours={
        "torch": "orchestrator.config.launchers:Torchrun",
        "mindspore": "orchestrator.engine.mindspore.msrun:Msrun",
        "plain": "orchestrator.config.launchers:Plain",
    },
)
TRACKERS = PluginKind(
    key="tracker.kind",
    group="orchestrator.trackers",
    ours={
        "tensorboard": "orchestrator.trainer.tensorboard:TensorBoard",
        "mlflow": "orchestrator.trackers.mlflow:MLflow",
        "wandb": "orchestrator.trackers.wandb:WandB",
    },
    besides=("none",),
)


SEARCHES = PluginKind(
    key="sweep.search",
    group="orchestrator.searches",
    ours=dict.fromkeys(("tpe", "random", "grid"), "orchestrator.search.method:OptunaSearch"),
    besides=("none",),
)
CALLBACKS = PluginKind(
    key="run.callbacks",
    group="orchestrator.callbacks",
    ours={
        "replay": "orchestrator.replay.observer:Observer",
        "sentinel": "orchestrator.sentinel.callback:Sentinel",
    },
)
COMMANDS = PluginKind(
    key="command",
    group="orchestrator.commands",
    ours={
        "report": "orchestrator.report_page.command:report",
        "rehearse": "orchestrator.rehearse.command:rehearse",
        "audit": "orchestrator.audit.command:audit",
        "replay": "orchestrator.replay.command:replay",
        "bisect": "orchestrator.replay.command:bisect",
    },
)
"""Verbs of `python -m orchestrator` besides those of `__main__.py`: functions for typer."""


def _entry_points(group: str) -> list[Any]:
    import importlib.metadata  # a quarter of what a plan takes; only a name of others pays for it

    return list(importlib.metadata.entry_points(group=group))


def _package(entry: Any) -> str:
    return f"{entry.dist.name} {entry.dist.version}"


def _is_there(where: str) -> bool:
    """Return whether the module of "module:Class" of this package exists. Imports nothing."""
    return os.path.exists(f"{ROOT}/{_path(where)}")  # noqa: PTH110  # paths are slow, for each of a table


def _path(where: str) -> str:
    """Return the file of "module:Class", below the folder of this package."""
    return where.partition(":")[0].replace(".", "/") + ".py"


def _missing_path(where: str) -> str:
    """Return what is missing of "module:Class": its folder, or the file in a folder that exists."""
    file = Path(_path(where))
    return str(file) if (ROOT / file.parent).exists() else f"{file.parent}/"


def imported(where: str) -> Any:
    """Import what "module:name" names."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
