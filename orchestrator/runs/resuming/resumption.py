"""`resume RUN key=value …`: the configuration to go on with, its checks, and the record of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from orchestrator.clusters.api import cluster_of
from orchestrator.config.changes import Change, changes
from orchestrator.config.command_line import CommandLine, check_overrides, key_of, spelled
from orchestrator.config.composer import Composer
from orchestrator.config.guard import check_arguments, guarded
from orchestrator.config.program import is_program
from orchestrator.config.reading import as_they_are, read_config, to_yaml, unknown_keys
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, PlanError
from orchestrator.plan.parts import Known
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan, plan_of_program
from orchestrator.rundir.checkpoints import PREFIX, complete, refuse_beyond
from orchestrator.rundir.files import read_text, write_atomically
from orchestrator.rundir.folder import RESUMES, RunDir
from orchestrator.runs.resuming.left_behind import refuse_left_behind
from orchestrator.runs.resuming.rules import refuse_another_plan, refuse_other_numbers, rounding
from orchestrator.units import format_count, plural

GROUPS = ("cluster", "tracker")  # whose choice a run may change; the others are its numbers
MOST_SHOWN = 6
PLACES = ("nodes", "ranks_per_node", "cpus_per_rank")  # stay, whatever another cluster's file says


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """How a run goes on.

    Attributes:
        config: to go on with.
        changes: of the run's configuration, by this command.
        plan: as far as it is known here.
        done: updates that the newest checkpoint holds; total: to be done, None if not known.
        warning: what a person should know of the changes.
    """

    config: Config
    overrides: tuple[str, ...]
    changes: list[Change]
    plan: Plan | ProgramPlan
    done: int
    total: int | None
    warning: str | None

    @property
    def words(self) -> str:
        """What is about to happen, for people."""
        if isinstance(self.plan, ProgramPlan):
            where = "starting the program again, to go on from what it saved"
            return self._placed(where)
        of = "" if self.total is None else f" of {format_count(self.total)}"
        after = f"going on after update {format_count(self.done)}{of}"
        return self._placed(after if self.done else "there is no checkpoint yet: beginning again")

    def _placed(self, where: str) -> str:
        ranks = f"{plural(self.plan.ranks, 'rank')} on {plural(self.plan.nodes, 'node')}"
        given = "".join(f", {c.text} (was {_shown(c.before)})" for c in self.changes[:MOST_SHOWN])
        more = len(self.changes) - MOST_SHOWN
        return f"{where}, {ranks}{given}" + (f" and {more} more" if more > 0 else "")


def resumption(
    run: RunDir,
    config: Config,
    overrides: Sequence[str],
    config_dir: str | None = None,
    *,
    to: Config | None = None,
) -> Resumption:
    """What `resume RUN overrides` asks for, checked; nothing is written.

    Args:
        config: of the run so far.
        to: what is asked for as a whole, in place of overrides.

    Raises:
        ConfigError: a key that is none, a value that cannot be, or one that makes other numbers.
        RunFolderError: `config` is one that the run has left behind.
    """
    before = asdict(config)
    refuse_left_behind(run, before)
    done = updates_saved(run)
    known = run.read_plan()
    old = plan = _plan(config, known)
    refuse_beyond(run, done, plan.updates)
    made: list[Change] = []
    if overrides or to is not None:
        config = to or _with(asdict(config), overrides, config_dir)
        made = changes(before, asdict(config))
        program = isinstance(old, ProgramPlan)
        refuse_other_numbers(made, str(run.path), program=program)
        plan = _plan(config, known)
        if isinstance(old, Plan) and isinstance(plan, Plan):
            refuse_another_plan(old, plan, done, str(run.path))
    return Resumption(
        config=config,
        overrides=tuple(overrides),
        changes=made,
        plan=plan,
        done=done,
        total=plan.updates,
        warning=None
        if isinstance(old, ProgramPlan) or isinstance(plan, ProgramPlan)
        else rounding(made, old, plan, config),
    )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def updates_saved(run: RunDir) -> int:
    """Updates that the newest complete checkpoint holds; 0 without one."""
    saved = complete(run.checkpoints)
    return int(saved[-1].name.removeprefix(PREFIX)) if saved else 0


def _plan(config: Config, known: Mapping[str, Any]) -> Plan | ProgramPlan:
    if is_program(config.job):
        return plan_of_program(config)
    try:
        samples, parameters = known.get("dataset_samples"), known.get("parameters")
        return Plan.of(config, Known(dataset_samples=samples, parameters=parameters))
    except PlanError as error:
        raise ConfigError(str(error)) from error


def _with(old: dict[str, Any], overrides: Sequence[str], config_dir: str | None) -> Config:
    """The configuration `old` with what was typed. Raises `ConfigError`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    check_arguments(overrides)
    check_overrides(overrides)
    values = as_they_are(old)
    stated = {key_of(text) for text in overrides}
    with guarded():
        for text in sorted(overrides, key=lambda text: "." in key_of(text)):  # groups first
            [override] = OverridesParser.create().parse_overrides([spelled(text)])
            if override.is_sweep_override() or override.is_delete() or override.package:
                raise ConfigError(f"resume takes KEY=VALUE, but was given {text}")
            key, value = override.key_or_group, override.value()
            if "." not in key and isinstance(value, str) and key != "transport":
                _choose(values, key, value, text, config_dir, stated)
            else:
                OmegaConf.update(values, key, value, force_add=True)
        if "train.epochs" in stated and "train.updates" not in stated:
            values.train.updates = None  # it would win, and what was typed would mean nothing
        plain: Any = OmegaConf.to_container(values, resolve=True)
    sentences = unknown_keys(plain)
    if sentences:
        raise ConfigError("\n".join(sentences))
    return read_config(plain)


def _choose(
    values: Any, group: str, choice: str, text: str, config_dir: str | None, stated: set[str]
) -> None:
    """Take another file of a group: `cluster=slurm`. The run's ranks stay as many."""
    if group not in GROUPS:
        raise ConfigError(
            f"resume cannot take {text}: it changes what is computed; it takes other values of "
            f"single keys, and {' or '.join(f'{name}=…' for name in GROUPS)}"
        )
    line = CommandLine(overrides=(f"{group}={choice}",), config_dir=config_dir)
    chosen = Composer(line).compose().values
    before = values[group]
    values[group] = chosen[group]
    if group == "cluster":
        for name in PLACES:
            values.cluster[name] = before[name]
        if "transport" not in stated and chosen["transport"] != "auto":
            values.transport = chosen["transport"]


def record(run: RunDir, resumed: Resumption, attempt: int) -> None:
    """Write down that a person asked for `attempt`, and with what; then change config.yaml.

    The configuration of the attempts before stays readable in the last of them, see
    `RunDir.config_of`. At every moment config.yaml is whole, the old one or the new one.
    """
    entry = {
        "attempt": attempt,
        "time": time.time(),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "overrides": list(resumed.overrides),
        "changes": {c.key: [c.before, c.after] for c in resumed.changes},
    }
    run.write_own(run.resumes, {RESUMES: [*run.read_resumes(), entry]})
    if not resumed.changes:
        return
    made = run.attempts_made()
    if made and run.attempt(made - 1).is_dir():
        kept = run.attempt(made - 1) / run.config.name
        if not kept.exists():
            write_atomically(kept, read_text(run.config))
    run.write_config(to_yaml(resumed.config))
    run.write_own(run.plan, resumed.plan.to_json())
    cluster = cluster_of(resumed.config)
    run.write_own(run.submission, {**run.read_submission(), **cluster.placed})
    if cluster.attended and run.handle.exists():  # the job that it names is over
        run.handle.rename(run.attempt(made - 1) / run.handle.name) if made else run.handle.unlink()
