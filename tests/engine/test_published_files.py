"""Published files and reserved ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from orchestrator.agent.topology import Topology
from orchestrator.engine.api import GroupSpec
from orchestrator.engine.common.rendezvous import RARE_S, Notice, keep_port
from orchestrator.engine.mindspore import rendezvous as mindspore
from orchestrator.engine.torch import rendezvous as torch_store
from orchestrator.trainer import program_environment
from tests.helpers import environment

WAIT_S = 4.0
AT_ONCE_S = 2.0  # with the delays of a busy machine
opened: list[str] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith("published.json"):
        opened.append(threading.current_thread().name)


def test_waiting_ranks_poll_rarely_and_their_neighbours_never(tmp_path):
    path = tmp_path / "published.json"
    heard: dict[str, tuple[float, object]] = {}

    def wait(name: str, node: str, *, first: bool) -> None:
        notice = Notice(path, node=node, first=first)
        while (found := notice.wait()) is None:
            pass
        heard[name] = time.monotonic(), found

    ranks = [("first", "n0", True), *((f"other{i}", "n0", False) for i in range(3)),
             ("orphan", "n1", False)]  # fmt: skip
    threads = [
        threading.Thread(target=wait, args=(name, node), kwargs={"first": first}, name=name)
        for name, node, first in ranks
    ]
    sys.addaudithook(_note)  # it cannot be taken away again, so it only looks at one name
    for thread in threads:
        thread.start()
    time.sleep(WAIT_S)
    looks = {name: opened.count(name) for name, *_ in ranks}
    partial = tmp_path / "partial"
    partial.write_text(json.dumps({"port": 7}))
    partial.replace(path)
    published = time.monotonic()
    for thread in threads:
        thread.join(60)
    # The first looks come quickly one after the other; after that, two in three seconds.
    assert looks["first"] <= 2 * WAIT_S + 2
    assert {looks[f"other{i}"] for i in range(3)} == {0}
    assert 0 < looks["orphan"] <= WAIT_S / RARE_S + 5  # at 0.2, 0.4, 0.8, 1.6, 3.2 s
    assert {name for name, *_ in ranks} == set(heard)
    assert all(found == {"port": 7} for _, found in heard.values())
    assert max(at for at, _ in heard.values()) - published < 5


def _a_torch_group(one):
    return torch_store.join(one, time.monotonic() + 30) if one.rank else torch_store.host(one)


def _a_mindspore_group(one):
    return mindspore.await_verdict(one) if one.rank else mindspore.decide(one, lambda: {"port": 7})


def _a_program(one):
    place = Topology(
        rank=one.rank, size=one.size, local_rank=one.local_rank, node_index=0, nodes=1,
        node=one.node, address=one.address, job_id="1",
    )  # fmt: skip
    published = one.folder / "meeting.json"
    if one.rank == 0:
        return program_environment.host(published, place, "torch", 30)
    return program_environment.find(published, place, 30, lambda: False)


@pytest.mark.parametrize("meet", [_a_torch_group, _a_mindspore_group, _a_program])
def test_a_neighbour_of_rank_0_gets_the_file_at_once(tmp_path, meet):
    began, took = time.monotonic(), []

    def be(rank):
        one = GroupSpec(rank=rank, size=2, local_rank=rank, node=f"{tmp_path}",
                        address="127.0.0.1", folder=tmp_path)  # fmt: skip
        kept.append(meet(one))
        took.append(time.monotonic() - began)

    kept: list[object] = []
    threads = [threading.Thread(target=be, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for place in kept:
        if isinstance(place, program_environment.ProgramRendezvous):
            place.close()
    assert len(took) == 2
    assert max(took) < AT_ONCE_S


def test_ranks_do_not_wait_for_a_publisher_that_has_ended(tmp_path):
    path = tmp_path / "published.json"
    notice = Notice(path, node="n0", first=False)
    path.write_text(json.dumps({"port": 7}))  # by a process that is gone: nobody can be asked
    began = time.monotonic()
    while notice.wait() is None:
        pass
    assert time.monotonic() - began < AT_ONCE_S


FIRST = """
import sys
from pathlib import Path
from orchestrator.engine.common.rendezvous import Notice
notice = Notice(Path(sys.argv[1]), node="n0", first=True)
print("here", flush=True)
sys.stdin.read()
"""


def test_a_stopped_first_rank_does_not_hide_the_file_from_its_neighbours(tmp_path):
    path = tmp_path / "published.json"
    with subprocess.Popen([sys.executable, "-c", FIRST, path], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, env=environment()) as first:  # fmt: skip
        assert first.stdout.readline() == b"here\n"
        notice = Notice(path, node="n0", first=False)
        assert notice.wait() is None
        os.kill(first.pid, signal.SIGSTOP)
        path.write_text(json.dumps({"port": 7}))
        assert {"port": 7} in [notice.wait() for _ in range(3)]
        first.kill()


# ------------------------------------------------------------------ Reserved ports


@pytest.fixture(params=[True, False], ids=["both families", "IPv4 alone"])
def keeper(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with keep_port("127.0.0.1") as found:
        yield found


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])  # noqa: S104  # refused
def test_no_other_socket_gets_a_reserved_port_at_any_address(keeper, address):
    """Else a store that listens at all addresses finds it in use at one of them."""
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((address, keeper.getsockname()[1]))


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_server_binds_the_reserved_port_and_it_stays_reserved_afterwards(keeper, address):
    place = (address, keeper.getsockname()[1])
    for _ in range(2):
        socket.create_server(place).close()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(place)


def test_an_address_of_another_node_is_refused():
    with pytest.raises(OSError, match="Cannot assign"):
        keep_port("192.0.2.1")
