"""Where everything of a run lies: nobody else spells a file name."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.inside.variables import STOP_AFTER, STOP_ASKED
from orchestrator.run_folder.files import check_folders, is_folder, names_in

RANKS_A_FOLDER = 512
RANK_LOG = re.compile(r"rank-([0-9]{1,9})\.log")
ATTEMPT = re.compile(r"[0-9]{1,6}")
OF_RANKS = re.compile(r"ranks-[0-9]+")
OWN_FOLDERS = (
    "logs", "checkpoints", "attempts", "tensorboard", "mlruns", "wandb", "code", "submitit",
)  # fmt: skip


class Below:
    """A path in a run's folder, made when it is first asked for: a command that looks at a thousand
    runs asks each for a few of them.
    """

    def __init__(self, *names: str) -> None:
        self._names = names

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, paths: RunPaths, owner: type) -> Path:
        found = paths.__dict__[self._attribute] = paths.path.joinpath(*self._names)
        return found


class RunPaths:
    """The paths of one run's folder. Making the object touches nothing."""

    config = Below("config.yaml")
    plan = Below("plan.json")
    metrics = Below("metrics.jsonl")
    result = Below("result.json")
    environment = Below("environment.json")
    submission = Below("submission.json")
    resumes = Below("resumes.json")  # what people asked for since
    initial_weights = Below("initial_weights.safetensors")
    logs = Below("logs")
    checkpoints = Below("checkpoints")
    tensorboard = Below("tensorboard")
    mlflow = Below("mlruns")
    wandb = Below("wandb")
    attempts = Below("attempts")
    lock = Below(".lock")
    # A run on a scheduler: where it was placed, the code that it runs, and what it was told.
    handle = Below("handle.json")
    submitting = Below("submitting.json")  # for as long as it may become a job
    turn = Below("turn.json")  # to be queued once there is room: `clusters/slurm/queue/in_turn.py`
    code = Below("code")
    submitit = Below("submitit")
    batch_log = Below("logs", "batch.log")
    terminal_log = Below("logs", "terminal.log")  # of who holds it, where others do, too
    cancel = Below("cancel")
    newest_attempt = Below("attempts", "newest")
    waiting = Below(".waiting")  # in a sweep's folder; see `runs/waiting.py`
    pruned = Below("pruned.json")  # why a search ended it early
    # Of a search, in the sweep's folder: its trials, and what people are shown of them.
    journal = Below("search.journal")
    search = Below("search.json")

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def may_be_queued(self) -> bool:
        """Whether a scheduler knows it, or may: then it is not ours alone to take back."""
        beside = self.path.parent / self.submitting.name  # that of an array
        return any(p.exists() for p in (self.handle, self.turn, self.submitting, beside))

    def attempt(self, number: int) -> Path:
        """Folder of one attempt (a start or restart): rendezvous, failures, progress."""
        return self.attempts / f"{number:03d}"

    def config_of(self, attempt: int) -> Path:
        """The configuration that an attempt ran with, also when a later `resume` changed it."""
        later = (number for number in self.attempt_numbers() if number >= attempt)
        kept = (self.attempt(number) / self.config.name for number in later)
        return next((path for path in kept if path.is_file()), self.config)

    def progress(self, attempt: int) -> Path:
        return self.attempt(attempt) / "progress"

    def timeline(self, attempt: int) -> Path:
        """Where the seconds of a few windows went, by rank; see `rank/attending/rank_times.py`."""
        return self.attempt(attempt) / "timeline.json"

    def failure(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"failure-{rank:05d}.json"

    def behind(self, attempt: int, rank: int) -> Path:
        """Where a rank of a scheduled run stands, while it stands still."""
        return self.attempt(attempt) / f"behind-{rank:05d}.json"

    def meeting_place(self, attempt: int) -> Path:
        """Where a program's ranks meet: an address and a port."""
        return self.attempt(attempt) / "meeting-place.json"

    def program_error(self, attempt: int, rank: int) -> Path:
        """What a program that uses torch's `record` says of its exception."""
        return self.attempt(attempt) / f"error-{rank:05d}.json"

    def program_end(self, attempt: int) -> Path:
        """How long a program ran, by rank 0's parent, which nothing ended before it."""
        return self.attempt(attempt) / "program.json"

    def stop_asked(self, attempt: int) -> Path:
        """Where a rank of a program says that it was asked to stop; see `inside/stop.py`."""
        return self.attempt(attempt) / STOP_ASKED

    def stop_after(self, attempt: int) -> Path:
        """The update after which a program's ranks agreed to stop."""
        return self.attempt(attempt) / STOP_AFTER

    def wordless(self, attempt: int) -> Path:
        """The first rank that ended without its last word; see `lifecycle/signs/last_word.py`."""
        return self.attempt(attempt) / "wordless"

    def departure(self, attempt: int) -> Path:
        """Why an attempt ended although the run goes on (preempted, a node lost, …)."""
        return self.attempt(attempt) / "departure.json"

    def restart(self, attempt: int) -> Path:
        """Why this attempt was needed, and what the one before it lost."""
        return self.attempt(attempt) / "restart.json"

    def heartbeat(self, attempt: int, node_index: int) -> Path:
        return self.attempt(attempt) / f"heartbeat-{node_index:05d}"

    def script_beat(self, attempt: int) -> Path:
        """That the batch script lives; see `lifecycle/signs/script_life.py`."""
        return self.attempt(attempt) / "batch-script"

    def warnings(self, attempt: int, node_index: int) -> Path:
        """What the ranks of one node warn of; see `run_warnings`, which reads all of an attempt."""
        return self.attempt(attempt) / f"warnings-{node_index:05d}.jsonl"

    def node_ranks(self, attempt: int, node_index: int) -> Path:
        """Which ranks an attempt had on a node."""
        return self.attempt(attempt) / f"node-{node_index:05d}.json"

    def srun_log(self, attempt: int) -> Path:
        return self.attempt(attempt) / "srun.log"

    def snapshot(self, attempt: int) -> Path:
        """The code that was submitted for this attempt and those that follow it by requeueing."""
        return self.code / f"{attempt:03d}"

    def rank_log(self, rank: int) -> Path:
        """A rank's log: in `logs`, and from rank 512 on in a folder there for each 512 ranks.

        Shared file systems are slow at folders of thousands of files.
        """
        first = rank - rank % RANKS_A_FOLDER
        folder = self.logs / f"ranks-{first:05d}" if first else self.logs
        return folder / f"rank-{rank:05d}.log"

    def all_logs(self) -> list[Path]:
        """All that lies in `logs` and its folders of many ranks."""
        own = [self.logs / name for name in names_in(self.logs)]
        folders = [path for path in own if OF_RANKS.fullmatch(path.name)]
        more = [folder / name for folder in folders for name in names_in(folder)]
        return [path for path in own if path not in folders] + more

    def ranks_with_logs(self) -> list[int]:
        """The ranks that have a log, in order."""
        names = map(RANK_LOG.fullmatch, (path.name for path in self.all_logs()))
        return sorted(int(found[1]) for found in names if found)

    def node_log(self, node: str) -> Path:
        return self.logs / f"{node}.log"

    def attempt_numbers(self) -> list[int]:
        """The attempts that have a folder, in order."""
        names = [name for name in names_in(self.attempts) if ATTEMPT.fullmatch(name)]
        return sorted(int(name) for name in names if is_folder(self.attempts / name))

    def attempts_made(self) -> int:
        """How many attempts were begun, judged by their folders."""
        return max(self.attempt_numbers(), default=-1) + 1

    def check_own_folders(self) -> None:
        """Raises `RunFolderError` where something else stands for a folder that a run writes in: a
        link would lead its writes elsewhere.
        """
        check_folders(self.path, OWN_FOLDERS.__contains__)
        check_folders(self.attempts, str.isdigit)
        check_folders(self.logs, OF_RANKS.fullmatch)
