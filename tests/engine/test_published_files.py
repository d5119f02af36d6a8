"""Published files and reserved ports."""

import socket

import pytest

from orchestrator.engine.common import rendezvous
from orchestrator.engine.common.rendezvous import Backoff, keep_port, publish, read_published


def test_waiting_ranks_poll_ever_more_rarely(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now[0])
    backoff, polls = Backoff(), []
    while now[0] < 60:
        polls.append(now[0])
        now[0] += backoff.next()
    assert sum(poll < 2 for poll in polls) < 25
    assert sum(poll >= 2 for poll in polls) < 45
    assert polls[1] < 0.1


def test_a_published_file_is_read_back_and_nothing_before(tmp_path):
    path = tmp_path / "published.json"
    assert read_published(path) is None
    publish(path, {"port": 7})
    assert read_published(path) == {"port": 7}


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
