"""A rank that waits for what another publishes: few looks at the file system, one reader a node."""

import json
import sys
import threading
import time

from orchestrator.engine.common.published_notice import ALONE_AFTER_S, Notice

WAIT_S = 4.0
opened: list[str] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith("published.json"):
        opened.append(threading.current_thread().name)


def test_waiting_ranks_look_twice_a_second_at_the_most_and_neighbours_not_at_all(tmp_path):
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
        thread.join(20)
    # The first looks come quickly one after the other; after that, two in three seconds.
    assert looks["first"] <= 2 * WAIT_S + 2
    assert {looks[f"other{i}"] for i in range(3)} == {0}
    assert 0 < looks["orphan"] <= 2 * (WAIT_S - ALONE_AFTER_S) + 4
    assert {name for name, *_ in ranks} == set(heard)
    assert all(found == {"port": 7} for _, found in heard.values())
    assert max(at for at, _ in heard.values()) - published < 5
