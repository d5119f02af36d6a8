"""Reading a metrics.jsonl that is being written, torn, redone and cut back."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import RunFolderError
from orchestrator.rundir import metrics
from orchestrator.rundir.files import LineFile
from orchestrator.rundir.metrics import (
    Figures,
    History,
    StoredHistory,
    Tail,
    read_metrics,
    read_metrics_around,
    summarize,
)
from orchestrator.rundir.outcome import State, result_from_records
from tests.run_folders import make_run, record


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


EVENTS = st.lists(
    st.tuples(st.sampled_from(["train", "resume", "lose", "redo"]), st.integers(0, 9)), max_size=12
)


def written(events):
    """Return what runs write that train, are resumed further back, or lose ranks."""
    found, update, attempt = [], 0, 0
    for event, number in events:
        if event == "train":
            for _ in range(number):
                found.append(record(update, attempt=attempt))
                if update % 3 == 0:
                    found.append(
                        {"update": update, "time": 1.0, "evaluation": {"accuracy": number}}
                    )
                update += 1
            continue
        back = min(number, update)
        if event == "redo":
            note = {"generation": 1, "gone": [1], "ranks": 3}
            found.append({"update": update, "attempt": attempt, "survived": note})
        elif event == "lose":
            update -= back
            note = {"generation": 1, "gone": [1], "ranks": 3, "lost_updates": back}
            found.append({"update": update, "attempt": attempt, "survived": note})
        else:
            update, attempt = update - back, attempt + 1
    return found


def test_a_history_of_positions_is_the_history_of_the_records(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(metrics, "RECENT_BYTES", 400)  # a line or two

    @given(EVENTS)
    def check(events):
        path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
        path.write_text('{"torn\n' + lines(*written(events)))
        kept, stored = History(Tail(path).read()), StoredHistory(Tail(path))
        assert list(stored.updates) == kept.updates
        assert list(stored.evaluations) == kept.evaluations
        assert stored.changes == kept.changes
        for update in range(len(kept.updates) + 1):
            around = read_metrics_around(path, update)
            assert around.update(update) == kept.update(update)
            assert around.evaluation(update) == kept.evaluation(update)

    check()


@pytest.fixture
def long(tmp_path):
    """A run of 20,000 updates, of which the last 100 were redone."""
    run = make_run(tmp_path / "run")
    redone = (record(n, attempt=1) for n in range(19_900, 20_000))
    run.metrics.write_text(lines(*(record(n) for n in range(20_000)), *redone))
    return run


@pytest.fixture
def reads(monkeypatch):
    """The lines that are read, counted."""
    found = []
    read = metrics._record
    monkeypatch.setattr(metrics, "_record", lambda line: found.append(len(line)) or read(line))
    return found


def test_each_update_of_a_long_run_is_parsed_once_and_its_record_is_not_kept(long, reads):
    tracemalloc.start()
    try:
        figures = result_from_records(long, State.STOPPED)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (figures["updates"], figures["collectives"]) == (20_000, 20_000)
    assert len(reads) <= 20_000 + 1, "which lines count is known without parsing them"
    assert peak < 100 * 20_000, "bytes an update; a record has 3,000"


def test_what_is_known_of_the_last_update_is_read_from_the_end(long, reads):
    around = read_metrics_around(long.metrics, 19_899)
    assert around.update(19_899) == record(19_899)
    assert len(reads) < 2_000


def test_numbers_of_an_update_are_those_of_its_whole_line_alone():
    line = lines(record(7, attempt=3, metrics={"attempt": 9, "error": 1e-9})).encode()
    assert metrics._numbers_of_update(line) == (7, 3)
    for end in range(len(line) - 1):
        assert metrics._numbers_of_update(line[:end] + b"\n") is None, line[:end]
    survivors = {"update": 7, "time": 1.0, "survived": {"gone": [1]}, "attempt": 3}
    evaluation = {"evaluation": {"accuracy": 1.0}, "update": 7, "time": 1.0, "attempt": 3}
    for other in (survivors, evaluation, record(7, note={"loss": {}}), {"update": 7, "time": 1.0}):
        assert metrics._numbers_of_update(lines(other).encode()) is None


SECONDS = {"update_s": 0.5, "compute_s": 0.25, "wait_s": 0.125, "optimizer_s": 0.0625}  # exact
CHANGES = st.dictionaries(
    st.sampled_from(["samples", "update_s", "time", "peak_memory_bytes", "collectives"]),
    st.sampled_from([None, 0, 3, 0.5]),
    max_size=1,
)


@given(st.lists(st.tuples(st.booleans(), CHANGES), max_size=12), st.integers(1, 4))
def test_figures_of_updates_are_the_same_together_and_one_by_one(events, together):
    attempt, updates = 0, []
    for number, (restarts, changes) in enumerate(events):
        attempt += restarts
        updates.append(record(number, attempt, **SECONDS | changes))
    one_by_one, all_together = Figures(), Figures()
    for update in updates:
        one_by_one.add(update)
    for begin in range(0, len(updates), together):
        all_together.add_all(updates[begin : begin + together])
    assert summarize({}, all_together) == summarize({}, one_by_one)
    assert all_together.spans == one_by_one.spans


def test_a_record_that_is_gone_is_named_and_not_skipped(long):
    history = read_metrics(long.metrics)
    long.metrics.write_text("")
    with pytest.raises(RunFolderError, match="was changed while it was read"):
        list(history.updates)
