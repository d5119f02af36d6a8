"""What people are told of ranks that went away while the others go on."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from orchestrator.config.schema import ClusterConfig, node_range
from orchestrator.engine.api import BoundaryReport, Engine, Framework, GroupSpec, Survives, Window
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import (
    ConfigError,
    Fenced,
    NoWayOn,
    OrchestratorError,
    PeerLost,
    RendezvousError,
    StateLost,
    StopRequested,
)
from orchestrator.lifecycle.signs.signs_of_life import Life
from orchestrator.lifecycle.survival.members import member_of, rank_of
from orchestrator.lifecycle.survival.membership import Generation, Members, Membership
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.topology import Topology
from orchestrator.rundir.warnings import warn
from orchestrator.snapshot import folder_of, is_installed
from orchestrator.trainer.failure import describe
from orchestrator.trainer.loop import Callback, Done, Outcome
from orchestrator.trainer.recorder import Notes, notes_of


def went_away(gone: Sequence[int], update: int, *, over: bool) -> str:
    """Who, and when.

    >>> went_away([3], 12, over=False), went_away([0, 1], 41, over=True)
    ('rank 3 went away in update 12; ', 'ranks 0, 1 went away after the last update, 40; ')
    """
    when = f"after the last update, {update - 1}" if over else f"in update {update}"
    return f"{ranks(gone)} went away {when}; "


def those_left(count: int, *, over: bool) -> str:
    """What they do: redo the update, or, where none was under way, end the run.

    >>> those_left(5, over=False), those_left(1, over=True)
    ('5 ranks redo it and go on', '1 rank ends the run')
    """
    if over:
        return f"{count} ranks end the run" if count > 1 else "1 rank ends the run"
    return f"{count} ranks redo it and go on" if count > 1 else "1 rank redoes it, alone"


def ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


# ----------------------------------------------------------------------
# Where a run stands, as a rank that has done the last update tells one that has not.


def standing_to_json(outcome: Outcome) -> str:
    """As text that travels."""
    if outcome.done is None:
        return "null"
    window = replace(outcome.done.window, micro_batches=())
    return json.dumps(
        {
            "window": asdict(window),
            "report": asdict(outcome.done.report),
            "seconds": outcome.done.seconds,
            "epoch": outcome.done.epoch,
            "samples": outcome.samples,
        }
    )


def take_standing(outcome: Outcome, text: str) -> None:
    """Stand there: one update farther, or, of a newcomer, wherever the others are."""
    found: dict[str, Any] = json.loads(text)
    window = Window(**found["window"] | {"micro_batches": ()})
    report = BoundaryReport(**found["report"])
    outcome.take(Done(window, report, found["seconds"], found["epoch"]))
    outcome.samples = found["samples"]


# ----------------------------------------------------------------------
# A job's own modules, told by their digests: a newcomer imports them later than the others did,
# and what it computes has to be what they compute.

OURS = "orchestrator"


def modules_of(job: Any) -> dict[str, str]:
    """Digests of all modules that were imported from the folder of this job's class, by name."""
    folder = folder_of(type(job))
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] == OURS:
            continue
        path = Path(file).absolute()
        if path.is_relative_to(folder) and not is_installed(path) and path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Modules that both have, but not alike.

    >>> changed({"job": "a", "net": "b"}, {"job": "c", "net": "b", "late": "d"})
    ['job']
    """
    return sorted(name for name in then.keys() & now.keys() if then[name] != now[name])


# ----------------------------------------------------------------------
# The group of the next generation: formed aside, so that it can be left where somebody dies.

LOOK_S = 0.005


def formed(framework: Framework, spec: GroupSpec, given_up: Callable[[], bool]) -> Any:
    """The group, from a thread that is left behind where one more of its members dies: what it
    waits for has no end then.

    Raises:
        PeerLost: it was `given_up` meanwhile.
    """
    found: list[Any] = []

    def form() -> None:
        try:
            found.append(framework.form_group(spec))
        except Exception as error:  # noqa: BLE001  # raised again by who waits
            found.append(error)

    thread = threading.Thread(target=form, name="forming", daemon=True)
    thread.start()
    while not found:
        thread.join(LOOK_S)
        if not found and given_up():
            raise PeerLost("one more rank is gone")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


# ----------------------------------------------------------------------
# How a rank goes on when others are gone or have come, in a group of those that are there.

SILENCE_S = 5.0
"""After which a rank that says nothing is gone, where cluster.heartbeat_timeout_s is not less."""
MARGIN_S = 3.0
GOES_BACK = (
    "nobody has its part of the optimizer's state, so the run goes back to its newest checkpoint, "
    "after update {}; "
)
MOST_TRIES = 3
"""So many groups may begin one update; what kills a fourth is in the update."""


def silence_s(cluster: ClusterConfig) -> float:
    """For how long a rank may be silent where the others would go on without it."""
    return min(cluster.heartbeat_timeout_s, SILENCE_S)


def least_nodes(cluster: ClusterConfig) -> int:
    """How many nodes have to be left: the range's least; one where a number was asked for."""
    return 1 if isinstance(cluster.nodes, int) else node_range(cluster.nodes)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank has its part with, among those that survive.

    Attributes:
        me: its number (`lifecycle/survival/members.py`).
        spec: that of the attempt's first group; `spec.size` ranks are what all began with.
        nodes: the number of each rank's node.
        least_nodes: so many have to be left.
    """

    me: int
    spec: GroupSpec
    framework: Framework
    engine: Survives
    nodes: Mapping[int, int]
    least_nodes: int
    silence_s: float


class Survivors(Callback):
    """One rank's part among them. `Entering` makes it.

    Args:
        membership: begun.
        record: of this attempt's generations.
        members: of the group that this rank is in; of a newcomer, those who let it in.
        generation: that group's number.
    """

    def __init__(
        self,
        part: Part,
        membership: Membership,
        record: GenerationRecord,
        *,
        members: Members,
        generation: int = 0,
    ) -> None:
        self._part, self._membership, self._record = part, membership, record
        self._engine, self._silence_s = part.engine, part.silence_s
        self._generation, self._members = generation, members
        self._history: list[Notes] = []
        self._tries = (-1, 0)
        self.place = part.spec.rank, part.spec.size
        self.back: Callable[[int], int | None] = lambda _: None
        self.over: Callable[[], bool] = lambda: False

    def end(self, word: str) -> None:
        """This rank ends: the others are not to go on without it."""
        self._membership.end(word)

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        """Leave the window when there is a newer generation; before the boundary, which tells all
        ranks, say whether newcomers wait.
        """
        del update
        if self._membership.latest.number > self._generation:
            raise PeerLost("another rank is gone")
        if done == steps:
            self._engine.newcomers_wait(self._membership.asked)

    def before_record(self) -> None:
        """On the rank that writes: raise `PeerLost` by the record itself, since the thread that
        hears of generations may have been stopped together with this rank.
        """
        if self.place[0] == 0 and self._record.read(self._generation + 1) is not None:
            raise PeerLost("another rank is gone")

    # ------------------------------------------------------------------ the next generation

    def enter(self, outcome: Outcome) -> list[Notes]:
        """As a newcomer that was let in, `go_on` to where the others stand."""
        return self.go_on(PeerLost("this rank takes its place again"), outcome)

    def grow(self, outcome: Outcome) -> list[Notes]:
        """After a boundary at which all heard of newcomers: go on with them. Collective; else as
        `go_on`.
        """
        self._engine.before_growth()
        self._membership.ready(self._generation, outcome.updates)
        with for_others("newcomers to be let in"):
            self._membership.await_newer(self._generation, self._part.spec.collective_timeout_s)
        return self.go_on(PeerLost("newcomers are let in"), outcome)

    def go_on(self, error: PeerLost, outcome: Outcome) -> list[Notes]:
        """Meet the others that are left, and stand where they do. Collective among these.

        Args:
            error: how this rank noticed.
            outcome: where this rank stands; it is brought up to where the others do.

        Returns:
            What is to be recorded, of this change and of those before it.

        Raises:
            Fenced: the others have gone on without this rank.
            NoWayOn: too many losses came in one update, or a part of the state is lost.
            PeerLost: nobody is known to be gone.
        """
        print(f"note: {error}", flush=True)  # goes to the rank's log
        noticed = 0.0
        with for_others("the next group to form"):
            while True:
                newer = self._next(error)
                noticed = noticed or newer.noticed
                try:
                    lost = self._join(newer, outcome)
                except NoWayOn:
                    raise
                except (PeerLost, RendezvousError, StopRequested) as again:
                    error = again if isinstance(again, PeerLost) else PeerLost(str(again))
                    print(f"note: {error}", flush=True)  # goes to the rank's log
                else:
                    return self._told(newer, outcome, time.monotonic() - noticed, lost)

    def _next(self, error: PeerLost) -> Generation:
        """The next generation. Raises as `go_on` does, once it is known that there is none."""
        newer = self._membership.await_newer(self._generation, self._silence_s + MARGIN_S)
        if newer is None:
            raise self._record.no_room or error
        self._generation = newer.number
        if self._part.me not in newer.members:
            raise Fenced(
                f"rank {self._part.spec.rank} was silent for {self._silence_s:g} s, and the others "
                f"have gone on without it (generation {newer.number})"
            ) from error
        return newer

    def _join(self, newer: Generation, outcome: Outcome) -> int | None:
        """Be in the group. How many updates a lost part of the state takes back; None: no part."""
        members = newer.members
        rank = members.index(self._part.me)
        group = self._formed(newer, rank)
        self._membership.on_news(group.interrupt)
        if (
            self._membership.latest.number > newer.number
        ):  # while nobody was there to be interrupted
            raise PeerLost("one more rank is gone")
        self.place = rank, len(members)
        try:
            told = self._engine.catch_up(group, outcome.updates, standing_to_json(outcome))
        except StateLost as lost:
            self._engine.regroup(group)
            if (taken_back := self.back(rank)) is None:
                raise self._no_way_on(f"{lost}, and there is no checkpoint yet") from lost
            return taken_back
        if told is not None:
            take_standing(outcome, told)
        self._engine.regroup(group)
        return None

    def _formed(self, newer: Generation, rank: int) -> Any:
        node = self._node_of(self._part.me)
        beside = [one for one in newer.members if self._node_of(one) == node]

        def given_up() -> bool:
            return self._membership.latest.number > newer.number

        spec = replace(
            self._part.spec,
            rank=rank,
            size=len(newer.members),
            generation=newer.number,
            reads=beside[0] == self._part.me,
            stop_requested=given_up,
        )
        return formed(self._part.framework, spec, given_up)

    def _told(
        self, newer: Generation, outcome: Outcome, seconds: float, lost: int | None
    ) -> list[Notes]:
        """The notes of all changes; raises `NoWayOn` where losses in this update are too many."""
        gone, came = self._change_to(newer.members)
        update, count = outcome.updates + 1 + (lost or 0), len(newer.members)
        facts = {
            "generation": newer.number, "ranks": count, "nodes": len(self._nodes),
            "seconds": round(seconds, 3),
        }  # fmt: skip
        over = lost is None and self.over()
        self._history.append(notes_of(gone, came, facts, lost, redone=not over))
        if came:
            self._say(f"{ranks(came)} came back; {count} ranks go on with update {update}")
        if gone:
            self._count_try(outcome.updates, ranks(gone))
            sentence = went_away(gone, update, over=over)
            if lost is not None:
                sentence += GOES_BACK.format(outcome.updates)
            self._say(sentence + (self._few() or those_left(count, over=over)))
        print(f"note: generation {newer.number} after {seconds:.2f} s", flush=True)
        return list(self._history)

    def _change_to(self, members: Members) -> tuple[list[int], list[int]]:
        """The ranks that are not in it any more, and those that have come."""
        old, new = set(self._members), set(members)
        self._members = members
        return self._ranks_of(old - new), self._ranks_of(new - old)

    def _ranks_of(self, members: set[int]) -> list[int]:
        return sorted(rank_of(one, self._part.spec.size) for one in members)

    def _count_try(self, updates: int, who: str) -> None:
        self._tries = (updates, 1 + self._tries[1] * (self._tries[0] == updates))
        if self._tries[1] > MOST_TRIES:
            raise self._no_way_on(
                f"{self._tries[1]} groups began update {updates + 1}, and each lost ranks in it, "
                f"at last {who}: what comes back so often is not survived"
            )

    def _say(self, sentence: str) -> None:
        """The first one says it to all who look; each in its log."""
        if self._members[0] == self._part.me:
            warn(sentence)
        print(f"note: {sentence}", flush=True)

    @property
    def nodes_gone(self) -> set[int]:
        """The nodes of which nobody is left."""
        return set(self._part.nodes.values()) - self._nodes

    @property
    def _nodes(self) -> set[int]:
        return {self._node_of(member) for member in self._members}

    def _node_of(self, member: int) -> int:
        return self._part.nodes[rank_of(member, self._part.spec.size)]

    def _no_way_on(self, why: str) -> NoWayOn:
        return NoWayOn(why, sorted(self.nodes_gone))

    def too_few(self) -> NoWayOn | None:
        """Why those that are left must not go on; None where they may."""
        words = self._few()
        return self._no_way_on(words) if words else None

    def _few(self) -> str:
        count, least = len(self._nodes), self._part.least_nodes
        if count >= least:
            return ""
        nodes = "1 node is" if count == 1 else f"{count} nodes are"
        return f"{nodes} left, fewer than cluster.nodes.min={least}, so the run does not go on"


# ----------------------------------------------------------------------
# How a rank comes to be among those that survive: with all others at the start, or later, alone,
# in the place of one that is gone.


@contextmanager
def may_stay_out() -> Generator[None]:
    """Whatever ends a newcomer before it is in concerns nobody else: the others go on as before."""
    try:
        yield
    except Fenced:
        raise
    except BaseException as error:
        if not isinstance(error, OrchestratorError):
            traceback.print_exception(error)
        raise Fenced(f"it could not take its place again: {describe(error)}") from error


class Entering:
    """What both ways have in common.

    Args:
        spec: that of the attempt's first group, also of a newcomer.
        engine: one that `Survives`.

    Raises:
        ConfigError: the framework's engine cannot go on in another group.
    """

    def __init__(
        self,
        spec: GroupSpec,
        cluster: ClusterConfig,
        topology: Topology,
        framework: Framework,
        engine: Engine,
        life: Life,
    ) -> None:
        if not life.has_agent:
            raise ConfigError(
                "run.survive=true needs an agent on each node, which starts the ranks"
            )
        if not hasattr(engine, "regroup"):
            raise ConfigError(
                f"run.survive=true is not available with the engine of {type(framework).__name__}, "
                "which cannot go on in another group; leave it out, and use run.max_restarts"
            )
        self._spec, self._cluster, self._framework, self._engine = spec, cluster, framework, engine
        self._me = member_of(spec.rank, topology.replaces, spec.size)
        self._record = GenerationRecord(spec.folder)
        self._silence_s = silence_s(cluster)
        self._nodes = topology.nodes
        self._membership = Membership(life, self._me, self._silence_s)

    def together(self, job: Any, group: Any) -> Survivors:
        """With all others, once the engine stands. Collective."""
        everyone = tuple(range(self._spec.size))
        self._membership.on_news(group.interrupt)
        self._membership.begin(modules_of(job))
        return Survivors(self._part(), self._membership, self._record, members=everyone)

    def alone(self, job: Any, stopped: Callable[[], bool]) -> Survivors:
        """In the place of one that is gone: ask, and wait to be let in at a boundary. `enter`
        follows.

        Raises:
            Fenced: the others' code is not this rank's, or there is nobody to go on with.
        """
        first = self._record.read(0)
        assert first is not None  # noqa: S101  # nobody is replaced before the ranks train
        if odd := changed(first["code"], modules_of(job)):
            raise Fenced(f"{', '.join(odd)} changed on disk since the others began")
        newer = self._membership.join(stopped)
        others = tuple(one for one in newer.members if one != self._me)
        return Survivors(
            self._part(), self._membership, self._record,
            members=others, generation=newer.number - 1,
        )  # fmt: skip

    def _part(self) -> Part:
        width = self._spec.size // self._nodes
        return Part(
            me=self._me,
            spec=self._spec,
            framework=self._framework,
            engine=cast("Survives", self._engine),
            nodes={rank: rank // width for rank in range(self._spec.size)},
            least_nodes=least_nodes(self._cluster),
            silence_s=self._silence_s,
        )
