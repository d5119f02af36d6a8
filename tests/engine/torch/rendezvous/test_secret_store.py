"""The store of a start is open to whoever reaches its port; what counts is signed."""

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from orchestrator.engine.torch.rendezvous.secret_store import SecretStore


@pytest.fixture(scope="module")
def whole():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def stores(whole, request):
    """Two that share a secret, of this test alone."""
    return [SecretStore(whole, request.node.name) for _ in range(2)]


def test_what_one_tells_the_other_hears_and_nothing_before(stores):
    mine, theirs = stores
    assert theirs.told("verdict") is None
    mine.tell("verdict", {"error": "ä", "ranks": [1, 2]})
    assert theirs.told("verdict") == mine.told("verdict") == {"error": "ä", "ranks": [1, 2]}


def test_of_many_names_each_gives_its_own_and_what_was_not_told_is_none(stores):
    mine, theirs = stores
    theirs.tell("b", "theirs")
    assert theirs.all_told(["b"]) == ["theirs"]
    assert theirs.all_told(["a", "b"]) == [None, "theirs"]
    mine.tell("a", 1)
    mine.tell("c", None)
    assert theirs.all_told(["c", "b", "a"]) == [None, "theirs", 1]
    assert theirs.all_told([]) == []


def test_another_secret_hears_nothing(stores, whole):
    stores[0].tell("verdict", "go")
    assert SecretStore(whole, "guessed").told("verdict") is None


def test_who_knows_the_keys_but_not_the_secret_is_not_heard(stores, whole):
    """As seen in the store's own list of keys, or on the network."""
    mine, theirs = stores
    for unsigned in ("", '"stop"', "0" * 64 + '"stop"', "x" * 63):
        mine.below.set("verdict", unsigned)
        assert theirs.told("verdict") is None
    SecretStore(whole, "guessed").tell("verdict", "stop")
    forged = SecretStore(whole, "guessed")._sign("verdict", b'"stop"') + '"stop"'
    mine.below.set("verdict", forged)
    assert theirs.told("verdict") is None


def test_what_was_signed_for_one_name_does_not_count_under_another_nor_when_changed(stores):
    mine, theirs = stores
    mine.tell("addresses", "go")
    signed = bytes(mine.below.get("addresses")).decode()
    mine.below.set("verdict", signed)
    assert theirs.told("verdict") is None
    mine.below.set("addresses", signed.replace("go", "no"))
    assert theirs.told("addresses") is None
    assert mine.told("addresses") == "go"  # one's own word is not asked for


def test_the_keys_lie_below_a_prefix_that_only_the_secret_gives(stores, whole):
    mine = stores[0]
    mine.tell("told", 1)
    assert not whole.check(["told"])
    assert not PrefixStore("", whole).check(["told"])
    prefix = mine._sign("prefix", b"")[:32]
    assert len(prefix) == 32
    assert PrefixStore(prefix, whole).check(["told"])


def test_a_count_adds_up_over_all_and_asking_does_not_change_it(stores):
    mine, theirs = stores
    assert [mine.count("here", 1), theirs.count("here", 2)] == [1, 3]
    assert [mine.count("here"), theirs.count("here")] == [3, 3]
