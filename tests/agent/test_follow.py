"""Connections between agents: the coordinator at the start, and relayed messages."""

import contextlib
import json
import signal
import socket

import pytest

from orchestrator.agent.agent import MAX_STRANGERS, MOST_REFUSALS, STRANGER_S, Agent
from orchestrator.agent.links import Link, Peer, connect, line_of, sign
from orchestrator.agent.node_spec import publish_agent, secret_of
from orchestrator.agent.workers import STOP_SIGNALS
from orchestrator.engine.common.rendezvous import listen
from orchestrator.rundir.generations import GenerationRecord
from tests.agent.specs import node_spec

pytestmark = pytest.mark.whole_runs


@pytest.fixture
def agent(begun):
    """The third node's agent, without workers."""
    secret_of(begun, 0)
    agent = Agent(node_spec(begun.path, index=2))
    yield agent
    agent._close_in_fork()


@pytest.fixture
def senior(agent):
    """The first node's end of the agent's link to it."""
    with listen("127.0.0.1") as listener:
        publish_agent(node_spec(agent._spec.run, index=0), listener.getsockname()[1])
        agent._follow()
        with listener.accept()[0] as senior:
            yield senior


def test_an_agent_waits_for_the_first_nodes_agent_even_if_others_are_earlier(agent):
    listeners = {index: listen("127.0.0.1") for index in (1, 0)}
    for index, listener in listeners.items():
        assert agent._coordinator_link is None
        publish_agent(node_spec(agent._spec.run, index=index), listener.getsockname()[1])
        agent._follow()
    assert agent._coordinator_link is not None
    assert agent._coordinator_link.peer_index == 0
    for listener in listeners.values():
        listener.close()


def test_an_agent_does_not_follow_another_one_at_the_address_of_its_coordinator(agent):
    port = agent._listener.getsockname()[1]
    for incarnation, accepted in ((1, False), (0, True)):
        link = connect(Peer("127.0.0.1", port, 2, incarnation), secret=agent._secret, node=0)
        agent._accept()
        [accepting] = agent._unauthenticated
        agent._hear_follower(accepting)
        assert (0 in agent._followers) is accepted
        assert not agent._unauthenticated
        link.close()


@pytest.mark.parametrize("sign", ["", "\\ud800", "0" * 64])
def test_who_cannot_read_the_run_folder_is_refused(agent, sign):
    port = agent._listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        agent._accept()
        stranger.sendall(b'{"node": 0, "sign": "' + sign.encode() + b'"}\n')
        [accepting] = agent._unauthenticated
        agent._hear_follower(accepting)
        assert not agent._followers
        assert stranger.recv(1) == b""


def test_an_agent_that_identifies_itself_late_is_heard_among_many_strangers(agent, monkeypatch):
    limit, port = MAX_STRANGERS + agent._spec.nodes, agent._listener.getsockname()[1]
    monkeypatch.setattr(agent, "_clock", lambda: 100.0)
    with contextlib.ExitStack() as opened:

        def connection():
            return opened.enter_context(socket.create_connection(("127.0.0.1", port)))

        late, strangers = connection(), [connection() for _ in range(limit + 3)]
        agent._accept()
        assert len(agent._unauthenticated) == limit, "others wait in the kernel"
        signature = sign(agent._secret, 0, agent._published.seniority)
        late.sendall(line_of({"node": 0, "sign": signature}))
        for link in list(agent._unauthenticated):
            agent._hear_follower(link)
        assert (list(agent._followers), len(agent._unauthenticated)) == ([0], limit - 1)
        monkeypatch.setattr(agent, "_clock", lambda: 100.0 + STRANGER_S)
        agent._accept()
        assert len(agent._unauthenticated) == limit
        closed = [stranger for stranger in strangers if _is_closed(stranger)]
        assert len(closed) == 3, "one for each that came"
        assert not _is_closed(late)


def _is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("spoke", [True, False])
def test_an_agent_whose_link_breaks_follows_again_who_has_spoken(agent, spoke):
    """One that never spoke was perhaps another agent at its address, which refused this one."""
    with listen("127.0.0.1") as listener:
        publish_agent(node_spec(agent._spec.run, index=0), listener.getsockname()[1])
        for refusals in range(MOST_REFUSALS):
            agent._follow()
            with listener.accept()[0] as senior:
                assert agent._coordinator_link is not None, refusals
                if spoke:
                    senior.sendall(b"{}\n")
                    agent._hear_coordinator()
            agent._hear_coordinator()
        agent._follow()
    assert (agent._coordinator_link is not None) is spoke
    assert (agent._coordinator is not None) is not spoke


@pytest.mark.parametrize("replaced", [False, True])
def test_an_agent_that_was_replaced_while_it_was_stopped_ends(agent, senior, replaced):
    if replaced:
        publish_agent(node_spec(agent._spec.run, index=2, incarnation=1), 1)
    senior.close()
    agent._hear_coordinator()
    assert agent._over is replaced


@pytest.mark.parametrize("replaced", [False, True])
def test_a_coordinator_that_was_stopped_learns_first_what_it_missed(agent, monkeypatch, replaced):
    agent._take_over()
    agent._beat_at = agent._clock()
    record = GenerationRecord(agent._run.attempt(0))
    for number, members in enumerate(([0, 1, 2], [0, 1])):
        record.publish(number, members)
    if replaced:
        publish_agent(node_spec(agent._spec.run, index=2, incarnation=1), 1)
    now = agent._clock._monotonic()
    monkeypatch.setattr(agent._clock, "_monotonic", lambda: now + 20.0)
    agent._turn()
    assert agent._over is replaced
    assert agent._coordinator._members.current == ([0, 1, 2] if replaced else [0, 1])


def test_an_agent_without_workers_returns_to_the_coordinator_that_another_one_follows(
    agent, senior
):
    agent._leave_coordinator(lost=True)  # it was silent
    with listen("127.0.0.1") as listener:
        publish_agent(node_spec(agent._spec.run, index=1), listener.getsockname()[1])
        agent._follow()
        assert agent._coordinator_link.peer_index == 1
        for to, followed in ((None, 1), ([0, 0], 0)):
            with listener.accept()[0] as other:
                other.sendall(line_of({"command": "refer", "to": to}))
                agent._hear_coordinator()
                agent._return_to_coordinator()
                agent._follow()
                assert agent._coordinator_link.peer_index == followed
                agent._leave_coordinator(lost=False)
                agent._follow()


def test_an_agent_refers_to_the_coordinator_that_it_follows(agent, senior):
    port = agent._listener.getsockname()[1]
    link = connect(Peer("127.0.0.1", port, 2), secret=agent._secret, node=1)
    link.send(workers=[])
    agent._accept()
    [accepting] = agent._unauthenticated
    agent._hear_follower(accepting)
    [message] = link.receive()
    assert message == {"command": "refer", "to": [0, 0]}
    link.close()


def test_a_peer_that_reads_late_delays_nobody_and_misses_nothing():
    ours, its = socket.socketpair()
    with ours, its:
        link, sent = Link(ours), 0
        while not link.unsent or sent < 10:  # more than the kernel takes
            assert link.send(number=sent, text="x" * 50_000)
            sent += 1
        reader, numbers = Link(its), []
        while len(numbers) < sent:
            link.flush()
            numbers += [message["number"] for message in reader.receive()]
        assert numbers == [*range(sent)]
        assert reader.receive() == []
        its.close()
        assert not link.send(number=sent)


def test_of_signals_that_come_together_none_is_forgotten(agent):
    """The one tells how long it is to the kill, whatever the other is."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    agent._handle_signals()
    try:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR2)
        agent._drain()
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert list(agent._workers._stops) == ["SIGTERM", "SIGUSR2"]


def test_a_coordinator_may_be_silent_for_longer_before_the_first_generation(agent, senior):
    link = agent._coordinator_link
    link.heard = agent._clock() - agent._spec.silence_s - 1.0
    agent._beat()
    assert agent._coordinator_link is link
    first = {"generation": 0, "members": [[0, 2]]}
    tell = {"command": "tell", "rank": None, "message": first}
    senior.sendall(json.dumps(tell).encode() + b"\n")
    agent._hear_coordinator()
    link.heard = agent._clock() - agent._spec.silence_s - 1.0
    agent._beat()
    assert agent._coordinator_link is None


def test_an_agent_sends_heartbeats_though_its_workers_cannot_be_judged(agent, senior, monkeypatch):
    def refuse(_stopped_limit_s):
        raise OSError(116, "Stale file handle")

    senior.recv(1 << 16)
    monkeypatch.setattr(agent._workers, "judge", refuse)
    with pytest.raises(OSError, match="Stale"):
        agent._beat()
    senior.setblocking(False)
    assert senior.recv(1 << 16) == line_of({})


def test_an_agent_ignores_what_is_relayed_to_it_for_another_node(agent, senior):
    for command in (
        {"command": "tell", "rank": 1, "message": {"newcomers": True}},
        {"command": "kill", "rank": 1},
        {"command": "start", "rank": 1, "incarnation": 1},
    ):
        senior.sendall(json.dumps(command).encode() + b"\n")
        agent._hear_coordinator()
    assert agent._coordinator_link is not None
    assert not agent._workers.all
