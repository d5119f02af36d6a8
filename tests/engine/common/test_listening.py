"""A port that is kept is its server's, at whichever address that listens, and nobody else's."""

import socket

import pytest

from orchestrator.engine.common.listening import keep_port


@pytest.fixture(params=[True, False], ids=["both families", "IPv4 alone"])
def keeper(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with keep_port("127.0.0.1") as found:
        yield found


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])  # noqa: S104  # refused
def test_nobody_else_is_given_it_at_any_address(keeper, address):
    """Else a store that listens at all addresses finds it in use at one of them."""
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((address, keeper.getsockname()[1]))


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_its_server_has_it_and_it_is_still_kept_once_that_has_gone(keeper, address):
    place = (address, keeper.getsockname()[1])
    for _ in range(2):
        socket.create_server(place).close()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(place)


def test_an_address_of_another_node_is_refused():
    with pytest.raises(OSError, match="Cannot assign"):
        keep_port("192.0.2.1")
