"""Reading a metrics.jsonl that is being written, torn, redone and cut back."""

import json

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rundir.files import LineFile
from orchestrator.rundir.metrics import History, Tail, read_metrics
from tests.run_folders import record


def lines(*records):
    return "".join(json.dumps(r) + "\n" for r in records)


def test_a_file_that_is_not_there_yet_has_no_records(tmp_path):
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.read() == []
    assert read_metrics(tail.path).updates == []


def test_every_record_is_returned_once_wherever_the_writer_pauses(tmp_path_factory):
    text = lines(*(record(n, note="ü") for n in range(3))).encode()

    @given(st.lists(st.integers(0, len(text)), max_size=6))
    def check(pauses):
        path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
        tail, seen = Tail(path), []
        for end in [*sorted(pauses), len(text)]:
            path.write_bytes(text[:end])
            seen += tail.read()
        assert [r["update"] for r in seen] == [0, 1, 2]

    check()


def test_a_torn_line_does_not_swallow_the_next_attempts_first_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\0\0\n[1]\n\xff\xfe\n\n" + lines(record(0), record(1)).encode()[:-30])
    file = LineFile(path)
    file.write(json.dumps(record(1, attempt=1)))
    file.close()
    assert [(r["update"], r["attempt"]) for r in Tail(path).read()] == [(0, 0), (1, 1)]


def test_of_what_is_there_already_whole_recent_lines_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(record(0), record(1)))
    size = path.stat().st_size
    for recent, updates in ((0, []), (size // 2 + 9, [1]), (size, [0, 1]), (2 * size, [0, 1])):
        assert [r["update"] for r in Tail(path, recent).read()] == updates, recent


def test_of_an_update_that_was_redone_the_last_line_counts():
    history = History([record(0), record(1), record(1, loss=9.0)])
    history.add([record(1, attempt=1, loss=7.0)])
    assert [r["loss"] for r in history.updates] == [1.0, 7.0]
    history.add([record(1, attempt=0, loss=8.0)])
    assert [r["loss"] for r in history.updates] == [1.0, 7.0]


def test_a_resume_forgets_what_was_thrown_away_with_its_weights():
    evaluation = {"evaluation": {"accuracy": 0.5}, "epoch": 0, "time": 0.0}
    history = History([record(n) for n in range(5)])
    history.add([{**evaluation, "update": n} for n in (1, 2, 4)])
    history.add([record(2, attempt=1)])
    assert [r["update"] for r in history.updates] == [0, 1, 2]
    assert [r["update"] for r in history.evaluations] == [1]


def test_survivors_that_go_back_to_a_checkpoint_forget_what_they_had_done_since():
    history = History([record(n) for n in range(6)])
    note = {"generation": 1, "gone": [1], "ranks": 3, "seconds": 0.1}
    history.add([{"update": 6, "survived": note}, record(6)])
    assert [r["update"] for r in history.updates] == list(range(7)), "the update under way alone"
    history.add([{"update": 4, "survived": {**note, "lost_updates": 3}}, record(4)])
    assert [r["update"] for r in history.updates] == list(range(5))
    assert len(history.changes) == 2
