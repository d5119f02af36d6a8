"""Rendezvous of torch ranks, and its authenticated store."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.torch_version import TorchVersion

from orchestrator.engine.torch import form_group, rendezvous
from orchestrator.engine.torch.rendezvous import SecretStore, rendezvous_file
from orchestrator.engine.torch.transports import RankCapabilities, choose, read_capabilities
from orchestrator.errors import RanksMissing, RendezvousError, StopRequested, TransportError
from orchestrator.local_ranks.processes import run_ranks, spec
from orchestrator.rundir.files import write_atomically
from tests.refusals import refused


def _listening(group):
    group.barrier()
    found = subprocess.run(["ss", "-tlnpH"], capture_output=True, text=True, check=True).stdout
    group.barrier()
    mine = [line.split()[3] for line in found.splitlines() if f"pid={os.getpid()}," in line]
    return group.generation, mine


def test_ranks_listen_only_at_their_own_nodes_address(tmp_path):
    results = run_ranks(3, tmp_path, _listening, generation=4)
    assert [generation for generation, _ in results] == [4, 4, 4]
    for rank, (_, addresses) in enumerate(results):
        assert addresses
        assert {address.rpartition(":")[0] for address in addresses} == {f"127.0.1.{rank + 1}"}


def test_torch_2_6_whose_store_takes_no_socket_with_libuv_can_meet_too(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0+cu124"))
    first, second = _formed(spec(0, 2, tmp_path), spec(1, 2, tmp_path))
    assert second.result().size == 2
    assert not first.result().store._whole.libuvBackend


def test_the_next_generation_is_formed_while_the_first_exists(tmp_path):
    def be(rank):
        groups = [form_group(spec(rank, 2, tmp_path, generation=one)) for one in range(2)]
        number = torch.ones(1)
        for group in reversed(groups):
            group.all_reduce_sum(number)
        return number.item()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(be, range(2))) == [4.0, 4.0]
    for generation in range(2):
        path = rendezvous_file(spec(0, 2, tmp_path, generation=generation))
        assert json.loads(path.read_text())["generation"] == generation


def _formed(*specs):
    """Form groups at once in threads; return their futures."""
    with ThreadPoolExecutor() as pool:
        return [pool.submit(form_group, one) for one in specs]


def test_missing_ranks_are_named_on_every_rank(tmp_path):
    formed = _formed(*(spec(rank, 5, tmp_path, timeout_s=1) for rank in (0, 2)))
    said = {repr(one.exception()) for one in formed}
    assert said == {"RanksMissing('ranks 1, 3-4 of 5 did not come within 1 s')"}


def test_rank_without_rank_0_is_refused(tmp_path):
    with refused(RanksMissing, "rank 1 node1 0"):
        form_group(spec(1, 2, tmp_path, timeout_s=0.3))


def test_an_address_of_an_earlier_attempt_is_not_taken_for_rank_0(tmp_path):
    stale = {"address": "127.0.0.1", "port": 9, "generation": 0, "size": 2, "token": "x"}
    rendezvous_file(spec(0, 2, tmp_path)).write_text(json.dumps(stale))
    with pytest.raises(RendezvousError, match=r"published an address .* but does not answer"):
        form_group(spec(1, 2, tmp_path, timeout_s=0.3))


def test_a_late_rank_reads_the_verdict(tmp_path):
    with pytest.raises(RendezvousError, match="rank 1 of 2"):
        form_group(spec(0, 2, tmp_path, timeout_s=0.2))
    with pytest.raises(RendezvousError, match="rank 1 of 2 did not come"):
        form_group(spec(1, 2, tmp_path, timeout_s=30))


def test_a_rank_that_fails_to_connect_reads_the_published_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_CONNECT_S", 0.2)
    path, stop = rendezvous_file(spec(0, 2, tmp_path)), {"generation": 0, "verdict": "stop"}
    listener = socket.create_server(("127.0.0.1", 0))
    here = {"address": "127.0.0.1", "port": listener.getsockname()[1], "token": "x"}
    path.write_text(json.dumps(here))

    def end_after_one_has_come():
        listener.accept()[0].close()
        listener.close()
        write_atomically(path, json.dumps(stop))

    rank_0 = threading.Thread(target=end_after_one_has_come)
    rank_0.start()
    with pytest.raises(StopRequested):
        form_group(spec(1, 2, tmp_path))
    rank_0.join()


GARBAGE = (b"\x00" * 4096, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x09" + b"\xff" * 64, b"")
LIE = b'{"verdict": "stop"}'


def _say_what_they_like(store):
    """Everything that decides a start, by its plain name and, where keys can be listed, by all."""
    keys = store.list_keys() if hasattr(store, "list_keys") else []
    below = {key.rpartition("/")[0] for key in keys}
    for name in ("verdict", "stop", "rank-0", "rank-1"):
        for key in (name, *(f"{folder}/{name}" for folder in below)):
            store.set(key, b"0" * 64 + LIE)
    for key in ("stop", "arrived", "read", *(key for key in keys if key.endswith("arrived"))):
        store.delete_key(key) if key == "stop" else store.add(key, 2)


def test_strangers_at_the_port_can_neither_end_a_start_nor_hang_it(tmp_path):
    """Rank 1 comes late; until then strangers send anything to the port."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(form_group, spec(0, 2, tmp_path, timeout_s=100))
        path = rendezvous_file(spec(0, 2, tmp_path))
        while not path.exists():
            time.sleep(0.01)
        assert path.stat().st_mode & 0o777 == 0o600
        published = json.loads(path.read_text())
        at = (published["address"], published["port"])
        with socket.create_connection(at, timeout=60):  # one that says nothing
            for garbage in GARBAGE:
                with socket.create_connection(at, timeout=60) as stranger:
                    stranger.sendall(garbage)
            client = TCPStore(*at, None, timeout=timedelta(seconds=60), wait_for_workers=False)
            _say_what_they_like(client)
            time.sleep(0.2)  # for what should not come
            assert not first.done()
            second = pool.submit(form_group, spec(1, 2, tmp_path, timeout_s=100))
            assert [formed.result().size for formed in (first, second)] == [2, 2]


def test_a_stop_while_waiting_reaches_all_that_wait(tmp_path):
    began = time.monotonic()

    def stop_requested():
        return time.monotonic() > began + 0.5

    formed = _formed(spec(0, 3, tmp_path), spec(1, 3, tmp_path, stop_requested=stop_requested))
    assert {type(one.exception()) for one in formed} == {StopRequested}
    assert time.monotonic() - began < 50  # the limit of forming is 60


def test_a_stop_before_rank_0_arrives_stops_rank_0_too(tmp_path):
    with pytest.raises(StopRequested):
        form_group(spec(1, 2, tmp_path, stop_requested=lambda: True))
    with pytest.raises(StopRequested):
        form_group(spec(0, 2, tmp_path))


def test_an_address_of_another_machine_is_refused(tmp_path):
    with pytest.raises(RendezvousError, match=r"cannot listen at 192\.0\.2\.1"):
        form_group(replace(spec(0, 2, tmp_path), address="192.0.2.1"))


# ------------------------------------------------------------------ transports


def _ranks(transport, gpus, *, nccl=True):
    return [
        RankCapabilities(rank=rank, node="n", transport=transport, gpu=gpu, nccl=nccl)
        for rank, gpu in enumerate(gpus)
    ]


def test_nccl_is_chosen_only_where_every_rank_has_a_gpu_of_its_own():
    assert choose(_ranks("auto", ["a", "b"])) == "nccl"
    assert choose(_ranks("auto", ["a", "a"])) == "gloo"
    assert choose(_ranks("auto", ["a", ""])) == "gloo"
    assert choose(_ranks("auto", ["a", "b"], nccl=False)) == "gloo"
    assert choose(_ranks("gloo", ["a", "b"])) == "gloo"


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (_ranks("auto", ["a", ""]), "rank 1 n GPU"),
        (
            [replace(one, device_error="GPU 3: lost") for one in _ranks("auto", ["", ""])],
            "rank 0 n GPU 3: lost",
        ),
    ],
)
def test_cpus_never_replace_requested_devices(ranks, names):
    assert choose(ranks) == "gloo"
    with_request = [replace(one, device_request="cluster.gpus_per_node=2") for one in ranks]
    with refused(TransportError, f"cluster.gpus_per_node=2 {names}"):
        choose(with_request)
    assert choose([replace(one, transport="gloo") for one in with_request]) == "gloo"


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (_ranks("nccl", ["a", "a"]), "ranks 0 1 n GPU"),
        (_ranks("nccl", ["a", ""]), "rank 1 n GPU"),
        (_ranks("nccl", ["a", "b"], nccl=False), "NCCL"),
        (_ranks("hccl", ["", ""]), "torch_npu"),
        (_ranks("mccl", ["", ""]), "MindSpore"),
        (_ranks("glooo", ["", ""]), "'glooo' 'gloo'"),
        (_ranks("gloo", [""]) + _ranks("nccl", [""]), "gloo nccl"),
    ],
)
def test_an_unavailable_transport_is_refused_and_not_replaced(ranks, names):
    with refused(TransportError, names):
        choose(ranks)


@pytest.mark.parametrize(
    ("npus", "visible", "names"),
    [
        (4, [None] * 3, None),
        (2, [None] * 3, "rank 2 NPU"),
        (1, [None] * 3, "ranks 0 1 NPU"),
        (1, ["6"] * 3, "ranks 0 1 NPU"),
        (1, ["6", "7", "8"], None),  # the scheduler shows each rank its own
    ],
)
def test_surplus_ranks_share_no_npu_in_silence(tmp_path, monkeypatch, npus, visible, names):
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__spec__=object()))
    fake = SimpleNamespace(device_count=lambda: npus)
    monkeypatch.setattr(torch, "get_device_module", lambda _: fake)
    everyone = []
    for rank, shown in enumerate(visible):
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
        if shown:
            monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", shown)
        everyone.append(read_capabilities(spec(rank, 3, tmp_path, transport="hccl", one_node=True)))
    if names is None:
        assert choose(everyone) == "hccl"
    else:
        with refused(TransportError, names):
            choose(everyone)


def test_one_rank_forms_a_group_of_its_own_at_once(tmp_path):
    group = form_group(spec(0, 1, tmp_path))
    assert (group.size, group.transport, list(tmp_path.iterdir())) == (1, "gloo", [])


# ------------------------------------------------------------------ Authenticated store


@pytest.fixture(scope="module")
def whole():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def stores(whole, request):
    """Two that share a secret, of this test alone."""
    return [SecretStore(whole, request.node.name) for _ in range(2)]


def test_values_of_a_writer_without_the_secret_are_ignored(stores, whole):
    """As seen in the store's own list of keys, or on the network."""
    mine, theirs = stores
    for unsigned in ("", '"stop"', "0" * 64 + '"stop"', "x" * 63):
        mine.below.set("verdict", unsigned)
        assert theirs.get("verdict") is None
    SecretStore(whole, "guessed").set("verdict", "stop")
    forged = SecretStore(whole, "guessed")._sign("verdict", b'"stop"') + '"stop"'
    mine.below.set("verdict", forged)
    assert theirs.get("verdict") is None


def test_a_signature_is_valid_for_one_name_and_one_value(stores):
    mine, theirs = stores
    mine.set("addresses", "go")
    signed = bytes(mine.below.get("addresses")).decode()
    mine.below.set("verdict", signed)
    assert theirs.get("verdict") is None
    mine.below.set("addresses", signed.replace("go", "no"))
    assert theirs.get("addresses") is None
