"""How a rank goes on when others are gone, in a group of those that are left.

What happens, and why no number changes: docs/surviving.md.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import asdict, replace
from typing import Any, cast

from orchestrator.config.schema import ClusterConfig, node_range
from orchestrator.engine.api import BoundaryReport, Engine, GroupSpec, Window
from orchestrator.engine.common.listening import listen
from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.framework import Framework
from orchestrator.engine.survives import Survives
from orchestrator.errors import (
    ConfigError,
    Fenced,
    NoWayOn,
    PeerLost,
    RendezvousError,
    StateLost,
    StopRequested,
)
from orchestrator.lifecycle.survival.agreement import Agreement, Generation
from orchestrator.lifecycle.survival.lifeline import Lifeline
from orchestrator.lifecycle.survival.links import Peer
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.topology import Topology
from orchestrator.rank.loop import Attended, Done, Outcome
from orchestrator.rank.watched_recorder import Watched
from orchestrator.run_warnings import warn

SILENCE_S = 5.0
"""After which a rank that says nothing is gone, where cluster.heartbeat_timeout_s is not less."""
MARGIN_S = 3.0
LOOK_S = 0.005
MOST_TRIES = 3
"""So many groups may begin one update; what kills a fourth is in the update."""


def silence_s(cluster: ClusterConfig) -> float:
    """For how long a rank may be silent where the others would go on without it."""
    return min(cluster.heartbeat_timeout_s, SILENCE_S)


def least_nodes(cluster: ClusterConfig) -> int:
    """How many nodes have to be left: the range's least; one where a number was asked for."""
    return 1 if isinstance(cluster.nodes, int) else node_range(cluster.nodes)[0]


class Survivors:
    """One rank's part among them. Made collectively, once the engine stands.

    Args:
        spec: that of the first group.
        engine: one that `Survives`.
        record: of this attempt's generations.

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
        group: Any,
    ) -> None:
        if not hasattr(engine, "regroup"):
            raise ConfigError(
                f"run.survive=true is not available with the engine of {type(framework).__name__}, "
                "which cannot go on in another group; leave it out, and use run.max_restarts"
            )
        self._spec, self._framework, self._me = spec, framework, topology.rank
        self._engine = cast("Survives", engine)
        self._least, self._silence_s = least_nodes(cluster), silence_s(cluster)
        self._record = GenerationRecord(spec.folder)
        self._generation, self._tries = 0, (-1, 0)
        self._members = tuple(range(spec.size))  # of the group that this rank was in last
        self.place = spec.rank, spec.size
        listener = listen(spec.address)
        if spec.rank == 0:
            self._record.publish(0, range(spec.size), secret=secrets.token_hex(16))
        mine = Peer(spec.address, int(listener.getsockname()[1]), topology.node_index)
        rows = engine.gather(mine.as_numbers())
        self._peers = {rank: Peer.of(row) for rank, row in enumerate(rows)}
        first = self._record.read(0)
        assert first is not None  # noqa: S101  # rank 0 published it before it gathered
        self._lifeline = Lifeline(
            Agreement(spec.rank, self._members), self._peers, listener,
            secret=first["secret"], record=self._record, silence_s=self._silence_s,
        )  # fmt: skip
        self._lifeline.on_news(group.interrupt)
        self._lifeline.start()

    def end(self, word: str) -> None:
        """This rank ends: the others are not to go on without it."""
        self._lifeline.end(word)

    def watched(self, inner: Attended) -> Attended:
        """`inner`, left in mid-window when somebody is gone; a rank that was given up writes
        nothing through it.
        """
        return Watched(inner, self)

    def check(self) -> None:
        """Raises `PeerLost` when there is a newer generation."""
        if self._lifeline.latest.number > self._generation:
            raise PeerLost("another rank is gone")

    def check_record(self) -> None:
        """`check` by the record itself: the thread may have stood still with this rank."""
        if self._record.read(self._generation + 1) is not None:
            raise PeerLost("another rank is gone")

    # ------------------------------------------------------------------ the next generation

    def go_on(self, error: PeerLost, outcome: Outcome) -> dict[str, Any]:
        """Meet the others that are left, and stand where they do. Collective among these.

        Args:
            error: how this rank noticed.
            outcome: where this rank stands; it is brought up to where the others do.

        Returns:
            What is to be recorded of it.

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
                    self._join(newer, outcome)
                except StateLost as lost:
                    raise self._no_way_on(self._say_lost(lost, newer, outcome)) from lost
                except (PeerLost, RendezvousError, StopRequested) as again:
                    error = again if isinstance(again, PeerLost) else PeerLost(str(again))
                    print(f"note: {error}", flush=True)  # goes to the rank's log
                else:
                    return self._told(newer, outcome, time.monotonic() - noticed)

    def _next(self, error: PeerLost) -> Generation:
        """The next generation. Raises as `go_on` does, once it is known that there is none."""
        newer = self._lifeline.await_newer(self._generation, self._silence_s + MARGIN_S)
        if newer is None:
            raise error
        self._generation = newer.number
        if self._me not in newer.members:
            raise Fenced(
                f"rank {self._me} was silent for {self._silence_s:g} s, and the others have gone "
                f"on without it (generation {newer.number})"
            ) from error
        return newer

    def _join(self, newer: Generation, outcome: Outcome) -> None:
        members = newer.members
        rank = members.index(self._me)
        group = self._formed(newer, rank)
        self._lifeline.on_news(group.interrupt)
        if self._lifeline.latest.number > newer.number:  # while nobody was there to be interrupted
            raise PeerLost("one more rank is gone")
        standing = self._engine.catch_up(group, outcome.updates, _standing(outcome))
        if standing is not None:
            _stand(outcome, json.loads(standing))
        self._engine.regroup(group)
        self.place = rank, len(members)

    def _formed(self, newer: Generation, rank: int) -> Any:
        """The group, from a thread that is left behind where one more of its members dies: what it
        waits for has no end then.
        """
        node = self._peers[self._me].node
        beside = [one for one in newer.members if self._peers[one].node == node]
        spec = replace(
            self._spec,
            rank=rank,
            size=len(newer.members),
            generation=newer.number,
            reads=beside[0] == self._me,
            stop_requested=lambda: self._lifeline.latest.number > newer.number,
        )
        found: list[Any] = []

        def form() -> None:
            try:
                found.append(self._framework.form_group(spec))
            except Exception as error:  # noqa: BLE001  # raised again by who waits
                found.append(error)

        thread = threading.Thread(target=form, name="forming", daemon=True)
        thread.start()
        while not found:
            thread.join(LOOK_S)
            if not found and self._lifeline.latest.number > newer.number:
                raise PeerLost("one more rank is gone")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _told(self, newer: Generation, outcome: Outcome, seconds: float) -> dict[str, Any]:
        """The note; raises `NoWayOn` where losses in this update are too many."""
        gone = sorted(set(self._members) - set(newer.members))
        self._members = newer.members
        who, update = _ranks(gone), outcome.updates + 1
        self._tries = (outcome.updates, 1 + self._tries[1] * (self._tries[0] == outcome.updates))
        if self._tries[1] > MOST_TRIES:
            raise self._no_way_on(
                f"{self._tries[1]} groups began update {update}, and each lost ranks in it, at "
                f"last {who}: what comes back so often is not survived"
            )
        sentence = f"{who} went away in update {update}; "
        sentence += self._few() or f"{len(newer.members)} ranks redo it and go on"
        if self.place[0] == 0:
            warn(sentence)
        print(f"note: {sentence} ({seconds:.2f} s)", flush=True)  # the rank's log
        return {
            "generation": newer.number,
            "gone": gone,
            "ranks": len(newer.members),
            "nodes": len(self._nodes),
            "seconds": round(seconds, 3),
        }

    def _say_lost(self, lost: StateLost, newer: Generation, outcome: Outcome) -> str:
        gone = sorted(set(self._members) - set(newer.members))
        self._members = newer.members
        told = (
            f"{_ranks(gone)} went away in update {outcome.updates + 1}; {lost}, since the rank "
            "that kept it, too, is gone. So the run does not go on from memory, but from its "
            "newest checkpoint (run.max_restarts, or resume)"
        )
        if newer.members[0] == self._me:
            warn(told)
        print(f"note: {told}", flush=True)  # the rank's log
        return told

    @property
    def nodes_gone(self) -> set[int]:
        """The nodes of which nobody is left."""
        return {peer.node for peer in self._peers.values()} - self._nodes

    @property
    def _nodes(self) -> set[int]:
        return {self._peers[rank].node for rank in self._members}

    def _no_way_on(self, why: str) -> NoWayOn:
        return NoWayOn(why, sorted(self.nodes_gone))

    def too_few(self) -> NoWayOn | None:
        """Why those that are left must not go on; None where they may."""
        words = self._few()
        return self._no_way_on(words) if words else None

    def _few(self) -> str:
        count = len(self._nodes)
        if count >= self._least:
            return ""
        nodes = "1 node is" if count == 1 else f"{count} nodes are"
        return (
            f"{nodes} left, fewer than cluster.nodes.min={self._least}, so the run does not go on"
        )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _standing(outcome: Outcome) -> str:
    """What a rank that has not ended the last update has to know of it."""
    if outcome.done is None:
        return "null"
    window = replace(outcome.done.window, micro_batches=())
    return json.dumps(
        {
            "window": asdict(window),
            "report": asdict(outcome.done.report),
            "seconds": outcome.done.seconds,
        }
    )


def _stand(outcome: Outcome, told: dict[str, Any]) -> None:
    window = Window(**told["window"] | {"micro_batches": ()})
    outcome.take(Done(window, BoundaryReport(**told["report"]), told["seconds"]))
