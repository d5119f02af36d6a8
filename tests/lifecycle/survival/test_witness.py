"""A process that vouches for another, which cannot speak, and not for one that is stopped or gone;
nobody speaks in its place, or keeps it from speaking. Asked as other ranks do (`vouchers.py`).
"""

import ctypes
import os
import select
import signal
import socket
import threading
import time

import pytest

from orchestrator.engine.common.rendezvous import listen
from orchestrator.lifecycle.survival.agreement import Agreement
from orchestrator.lifecycle.survival.links import Link, Peer, refuses
from orchestrator.lifecycle.survival.silence import Silences
from orchestrator.lifecycle.survival.vouchers import Vouchers, letter_told
from orchestrator.lifecycle.survival.witness import MOST_ASKING, begin_witness, sign

SECRET = "of this test"  # noqa: S105  # and of nobody else
ME, RANK = 0, 1


@pytest.fixture
def held():
    """A process that holds Python's interpreter and waits, and where its witness is asked."""
    listener = listen("127.0.0.1")
    peer = Peer("127.0.0.1", 1, 1, listener.getsockname()[1])
    heard, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        begin_witness(listener, SECRET, RANK)
        os.write(tell, b"x")
        ctypes.PyDLL(None).sleep(600)
        os._exit(0)
    listener.close()
    os.read(heard, 1)
    yield pid, peer
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def silent(vouchers, link, seconds):
    """Whether the link's rank is given up within so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if vouchers.no_word(link, time.monotonic()):
            return True
        time.sleep(0.02)
    return False


def vouchers_of(peer, silence_s=0.6, most_s=60.0):
    peers = {RANK: peer}
    return Vouchers(Agreement(ME, (ME, RANK)), peers, Silences(peers, silence_s), SECRET, most_s)


def link_of(one):
    return Link(one, rank=RANK, answered=True)


def test_one_that_holds_the_interpreter_is_vouched_for_and_one_that_is_stopped_or_gone_is_not(
    held,
):
    pid, peer = held
    one = socket.socket()
    vouchers, link = vouchers_of(peer), link_of(one)
    assert letter_told(peer, RANK, SECRET) == "S"
    with pytest.warns(UserWarning, match="rank 1 has said nothing for 1 s"):
        assert not silent(vouchers, link, 2.0)
    assert vouchers.beat == {"waits": True}
    os.kill(pid, signal.SIGSTOP)
    assert silent(vouchers, link, 2.0)
    assert letter_told(peer, RANK, SECRET) == "T"
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 2.0
    while not refuses(Peer(peer.address, peer.witness, 1), 1.0):
        assert time.monotonic() < until, "it ends with its process"
    one.close()


def test_nobody_is_vouched_for_longer_than_the_watchdog_bears(held):
    _, peer = held
    with socket.socket() as one, pytest.warns(UserWarning, match="the others wait"):
        assert silent(vouchers_of(peer, most_s=0.5), link_of(one), 2.0)


def test_garbage_and_those_who_say_nothing_do_not_keep_it_from_answering(held):
    _, peer = held
    where = (peer.address, peer.witness)
    quiet = [socket.create_connection(where) for _ in range(3 * MOST_ASKING)]
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\xff" * 32 + b"\n", b"x"):
        with socket.create_connection(where) as stranger:
            stranger.sendall(said)
    assert letter_told(peer, RANK, SECRET) == "S"
    ready, *_ = select.select([quiet[0]], [], [], 4.0)
    assert ready, "who asks nothing is let go"
    for one in quiet:
        one.close()


@pytest.mark.parametrize("secret", ["another's", SECRET])
def test_who_has_not_the_secret_or_repeats_an_old_word_vouches_for_nobody(secret):
    """Of another secret; of this one, but said to a number that somebody drew before."""
    with listen("127.0.0.1") as listener:
        peer = Peer("127.0.0.1", 1, 1, listener.getsockname()[1])

        def answer():
            link = listener.accept()[0]
            number = link.recv(64).decode().strip() if secret != SECRET else "0" * 32
            link.sendall(f"R {sign(secret, RANK, number, 'R')}\n".encode())
            link.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError):
            letter_told(peer, RANK, SECRET)
        thread.join()
