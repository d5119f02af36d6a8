"""The one place that runs SLURM's commands: with a deadline, a clean environment, and their errors
put into words.

Nothing of an enclosing job (SLURM_*, SBATCH_* …) reaches them but SLURM_CONF, and none of the
person's own filters (SQUEUE_STATES, …). Without a controller each command takes about 10 s to say
so, which is why watchers use `start` and look again later.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import ClusterError, NotNow
from orchestrator.scheduler.environment import clean_environment

TIMEOUT_S = 60.0
CONF = "SLURM_CONF"
# A person's own defaults of these commands: a partition in SQUEUE_PARTITION hides jobs of others.
FILTERS = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_", "SACCTMGR_")
DOWN = (
    "unable to contact slurm controller",
    "unable to contact the controller",
    "socket timed out",
    "connection refused",
    "zero bytes were transmitted",
    "slurm backup controller in standby mode",
    "unable to establish controller machine",
    "connect failure",
    "communications connection failure",
    "transport endpoint is not connected",
    "connection reset",
    "munge",  # the credentials' daemon is away: nothing can be asked, and nothing was said
    "protocol authentication error",
    "problem talking to the database",
    "temporarily unable to",
)
MEANINGS = {
    "invalid partition": "there is no such partition; `sinfo` lists those that you may use",
    "invalid account": "the account may not be used here; `sacctmgr show associations` lists yours",
    "invalid qos": "there is no such quality of service for you",
    "node count specification invalid": "cluster.nodes is more than the partition has",
    "requested node configuration is not available": (
        "no node of the partition has what is asked of one: look at cluster.ranks_per_node x "
        "cluster.cpus_per_rank, cluster.memory_gib, cluster.gpus_per_node"
    ),
    "time limit is invalid": "cluster.time_min is above the partition's limit",
    "invalid generic resource": (
        "there is no such resource (GPU, NPU) on this cluster: look at cluster.gpus_per_node and "
        "cluster.slurm_flags.gres"
    ),
    "invalid feature": "no node has what cluster.constraint asks for",
    "reservation is invalid": "there is no such reservation, or it is not yours",
    "invalid node name": "cluster.exclude names a node that does not exist",
    "more processors requested than permitted": (
        "cluster.ranks_per_node x cluster.cpus_per_rank is more than a node has"
    ),
    "violates accounting/qos policy": "a limit of your account stands against it",
}
ELSEWHERE = (
    "SLURM runs are submitted and followed on a machine of the cluster (a login node); without "
    "+cluster=slurm a run is local, and `python -m slurm up` makes a development cluster, for "
    "+cluster=slurm_dev"
)


class SchedulerDown(NotNow):
    """The scheduler does not answer; what was asked may be asked again later."""


class NoClient(ClusterError):
    """SLURM's commands are not installed here, or know of no cluster."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def down(self) -> bool:
        text = self.err.lower()
        return self.code != 0 and any(phrase in text for phrase in DOWN)

    @property
    def knows_no_such_job(self) -> bool:
        """Whether the scheduler itself said that there is no such job."""
        return self.code != 0 and "invalid job id" in self.err.lower()

    @property
    def homeless(self) -> bool:
        """Whether there is no slurm.conf to be found, here or on the network."""
        return self.code != 0 and "could not establish a configuration source" in self.err.lower()

    @property
    def words(self) -> str:
        """What it complained of, in its own words."""
        return "\n".join(line for line in self.err.splitlines() if line.strip()) or self.out.strip()


def explained(words: str) -> str:
    """The scheduler's own words, and what they mean here."""
    meaning = next((text for phrase, text in MEANINGS.items() if phrase in words.lower()), None)
    return f"the scheduler refuses it: {words}" + (f"\n{meaning}" if meaning else "")


class Asked:
    """A command under way."""

    def __init__(self, argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._argv = argv
        self._deadline = time.monotonic() + TIMEOUT_S
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe's buffer holds 64 KiB only
        self._process = subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL, stdout=self._out,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip

    def answer(self) -> Answer | None:
        """The answer once there is one."""
        if self._process.poll() is None:
            if time.monotonic() < self._deadline:
                return None
            self.forget()
            return Answer(124, "", f"{self._argv[0]}: socket timed out after {TIMEOUT_S:g} s")
        _, err = self._process.communicate()
        with self._out as file:
            file.seek(0)
            return Answer(self._process.returncode, file.read().decode("utf-8", "replace"), err)

    def forget(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._out.close()


NO_FILE = "there is no such file"


def _unreadable(path: str) -> str | None:
    """Why a slurm.conf cannot be used from here; None when it can."""
    try:
        with Path(path).open("rb"):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return NO_FILE
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


class SlurmClient:
    """SLURM's commands for one cluster: the one of `slurm_conf`, or the machine's own."""

    def __init__(self, slurm_conf: str | None = None) -> None:
        self._conf = str(Path(slurm_conf).expanduser()) if slurm_conf else None
        # SLURM's commands would look for a file that they cannot read for a minute.
        if self._conf is not None and (why := _unreadable(self._conf)):
            absent = "; for the development cluster run `python -m slurm up` first"
            hint = absent if why == NO_FILE else ""
            raise ClusterError(f"cluster.slurm_conf={slurm_conf}: {why}{hint}")
        told = os.environ.get(CONF)
        if self._conf is None and told is not None and (why := _unreadable(told)):
            raise NoClient(f"{CONF}={told}: {why}; unset it, or correct it")

    def environment(self, command: str) -> dict[str, str]:
        """For a command: ours, without traces of an enclosing job. A job inherits sbatch's."""
        conf = self._conf or os.environ.get(CONF)
        batch = command == "sbatch"
        drop = ("SLURMD_",) if batch else ("SLURMD_", *FILTERS)
        clean = clean_environment(os.environ).items()
        return {
            **{name: value for name, value in clean if not name.startswith(drop)},
            **({CONF: conf} if conf else {}),
            **({} if batch else {"SLURM_TIME_FORMAT": "%s"}),
        }

    def _argv(self, command: tuple[str, ...]) -> tuple[str, ...]:
        if shutil.which(command[0]) is None:
            raise NoClient(f"there is no {command[0]} on this machine: {ELSEWHERE}")
        return command

    def start(self, *command: str) -> Asked:
        """Begin a command without waiting for its answer."""
        return Asked(self._argv(command), self.environment(command[0]))

    def ask(
        self,
        *command: str,
        text: str | None = None,
        timeout_s: float = TIMEOUT_S,
        holding: int | None = None,
    ) -> Answer:
        """Run a command to its end. Raises `SchedulerDown` when nobody answers.

        Args:
            holding: a descriptor that it keeps open for as long as it runs, whatever becomes of
                us. A Ctrl-C at our terminal is not its concern then.
        """
        argv = self._argv(command)
        own: dict[str, Any] = {"timeout": timeout_s}
        if holding is not None:
            own |= {"pass_fds": (holding,), "start_new_session": True}
        try:
            done = subprocess.run(
                argv, input=text or "", env=self.environment(command[0]), capture_output=True,
                text=True, errors="replace", check=False, **own,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SchedulerDown(f"{command[0]} did not answer within {timeout_s:g} s") from error
        answer = Answer(done.returncode, done.stdout, done.stderr)
        if answer.homeless:
            raise NoClient(f"this machine has {command[0]}, but belongs to no cluster: {ELSEWHERE}")
        if answer.down:
            raise SchedulerDown(f"the scheduler does not answer: {answer.words}")
        return answer

    def cluster_name(self) -> str:
        """The name of this cluster among others. Raises `ClusterError`."""
        shown = self.must("scontrol", "show", "config")
        found = re.search(r"^ClusterName\s*=\s*(\S+)", shown, re.MULTILINE)
        return found[1] if found else ""

    def must(self, *command: str) -> str:
        """Standard output of a command that has to succeed. Raises `ClusterError` otherwise."""
        answer = self.ask(*command)
        if answer.code:
            raise ClusterError(f"{' '.join(command)}: {answer.words}")
        return answer.out
