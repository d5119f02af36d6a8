"""How a rank comes to be among those that survive: with all others at the start, or later, alone,
in the place of one that is gone.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from orchestrator.config.schema import ClusterConfig
from orchestrator.engine.api import Engine, Framework, GroupSpec, Survives
from orchestrator.engine.common.rendezvous import listen
from orchestrator.errors import ConfigError, Fenced, OrchestratorError
from orchestrator.lifecycle.signs.signs_of_life import Life
from orchestrator.lifecycle.survival.agreement import Agreement
from orchestrator.lifecycle.survival.asking import Asking
from orchestrator.lifecycle.survival.lifeline import Lifeline
from orchestrator.lifecycle.survival.links import Peer
from orchestrator.lifecycle.survival.members import member_of
from orchestrator.lifecycle.survival.membership import Membership
from orchestrator.lifecycle.survival.record import GenerationRecord
from orchestrator.lifecycle.survival.silence import Borne
from orchestrator.lifecycle.survival.witness import begin_witness
from orchestrator.lifecycle.topology import Topology
from orchestrator.rank.failure import describe
from orchestrator.rank.surviving.same_code import changed, modules_of
from orchestrator.rank.surviving.survivors import Part, Survivors, least_nodes, silence_s


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
        if not hasattr(engine, "regroup"):
            raise ConfigError(
                f"run.survive=true is not available with the engine of {type(framework).__name__}, "
                "which cannot go on in another group; leave it out, and use run.max_restarts"
            )
        self._spec, self._cluster, self._framework, self._engine = spec, cluster, framework, engine
        self._me = member_of(spec.rank, topology.replaces, spec.size)
        self._record = GenerationRecord(spec.folder)
        self._silence_s = silence_s(cluster)
        self._membership: Membership | None = None
        self._topology = topology
        if life.has_agent:
            self._membership = Membership(life, self._me, self._silence_s)
            return
        self._listener, self._asked = listen(spec.address), listen(spec.address)
        ports = [int(one.getsockname()[1]) for one in (self._listener, self._asked)]
        self._mine = Peer(spec.address, ports[0], topology.node_index, ports[1])

    def together(self, job: Any, group: Any) -> Survivors:
        """With all others, once the engine stands. Collective."""
        everyone = tuple(range(self._spec.size))
        if self._membership is not None:
            self._membership.on_news(group.interrupt)
            self._membership.begin(modules_of(job))
            return Survivors(self._part(), self._membership, self._record, members=everyone)
        rows = self._engine.gather(self._mine.as_numbers())
        if self._spec.rank == 0:
            self._record.publish(
                0, everyone, secret=secrets.token_hex(16), code=modules_of(job),
                peers={str(rank): row for rank, row in enumerate(rows)},
            )  # fmt: skip
        self._engine.gather([0.0])  # until it is there
        lifeline = self._lifeline(Agreement(self._me, everyone))
        lifeline.on_news(group.interrupt)
        lifeline.start()
        self._engine.gather([0.0])  # until all are told of each end: none is a loss that is none
        return Survivors(self._part(), lifeline, self._record, members=everyone)

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
        if self._membership is not None:
            newer = self._membership.join(stopped)
            others = tuple(one for one in newer.members if one != self._me)
            return Survivors(
                self._part(), self._membership, self._record,
                members=others, generation=newer.number - 1,
            )  # fmt: skip
        asking = Asking(
            me=self._me, peer=self._mine, record=self._record, silence_s=self._silence_s,
            patience_s=self._cluster.rendezvous_timeout_s, stopped=stopped,
        )  # fmt: skip
        newer, link = asking.until_let_in()
        agreement = Agreement(self._me, newer.members, self._spec.size, newer.number)
        lifeline = self._lifeline(agreement, up=link).start()
        others = tuple(one for one in newer.members if one != self._me)
        return Survivors(
            self._part(), lifeline, self._record, members=others, generation=newer.number - 1
        )

    def _lifeline(self, agreement: Agreement, **more: Any) -> Lifeline:
        first = self._record.read(0)
        assert first is not None  # noqa: S101  # rank 0 has published it
        self._witness = begin_witness(self._asked, first["secret"], self._me)
        return Lifeline(
            agreement, self._record.peers(), self._listener,
            secret=first["secret"], record=self._record,
            borne=Borne(self._silence_s, self._cluster.hang_timeout_s), **more,
        )  # fmt: skip

    def _part(self) -> Part:
        if self._membership is not None:
            width = self._spec.size // self._topology.nodes
            nodes = {rank: rank // width for rank in range(self._spec.size)}
        else:
            peers = self._record.peers()
            nodes = {rank: peers[rank].node for rank in range(self._spec.size)}
        return Part(
            me=self._me,
            spec=self._spec,
            framework=self._framework,
            engine=cast("Survives", self._engine),
            nodes=nodes,
            least_nodes=least_nodes(self._cluster),
            silence_s=self._silence_s,
        )
