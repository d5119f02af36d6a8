"""Whoever dies when, the lines that are written name each rank that went away or came, once."""

import random

import pytest

from orchestrator.rundir.metrics import History
from orchestrator.trainer.recorder import WHO, merged, notes_of, unrecorded


def facts(generation, ranks):
    return {"generation": generation, "ranks": ranks, "nodes": 1, "seconds": 0.125}


@pytest.mark.parametrize("seed", range(300))
def test_each_change_is_named_in_one_line_that_counts_whichever_writers_die(seed):
    """Lines of updates that are done again, after a return to a checkpoint, do not count."""
    draw = random.Random(seed)
    members, lines, pending, updates = list(range(6)), [], {}, 0
    history = {member: [] for member in members}
    said, changes = {key: [] for key in WHO}, 0

    def write():
        nonlocal updates, pending
        lines.append({"update": updates, "loss": 1.0, **pending})
        updates, pending = updates + 1, {}

    for generation in range(1, 12):
        gone = draw.sample(members, draw.randrange(len(members)))
        came = [] if gone or pending else [max(members) + 1]  # at a boundary, behind all others
        if not gone and not came:
            write()
            continue
        left = [one for one in members if one not in gone]
        members = left + came
        lost = draw.randrange(updates + 1) if gone and draw.random() < 0.3 else None
        updates -= lost or 0
        notes = notes_of(gone, came, facts(generation, len(members)), lost)
        for member in members:
            history.setdefault(member, []).append(notes)
        changes += bool(gone) + bool(came)
        said["survived"] += gone
        said["joined"] += came
        pending = unrecorded(history[members[0]], History(lines).updates, updates)
        if draw.random() < 0.5:
            write()
    write()
    counted = History(lines).updates
    assert [line["update"] for line in counted] == list(range(updates))
    for key, who in WHO.items():
        assert sorted(n for line in counted if key in line for n in line[key][who]) == sorted(
            said[key]
        )
    spent = sum(line[key]["seconds"] for line in counted for key in WHO if key in line)
    assert spent == 0.125 * changes


def test_updates_that_were_taken_back_add_up():
    first = notes_of([2], [], facts(1, 3), 2)
    assert merged(first, notes_of([1], [], facts(2, 2), None))["survived"]["lost_updates"] == 2
    assert merged(first, notes_of([1], [], facts(2, 2), 0))["survived"]["lost_updates"] == 2
    assert "lost_updates" not in merged({}, notes_of([1], [], facts(2, 2), None))["survived"]


def test_who_goes_after_the_last_update_has_it_redone_by_nobody():
    ended = notes_of([1], [], facts(2, 2), None, redone=False)
    assert ended["survived"]["redone"] == 0
    earlier = notes_of([2], [], facts(1, 3), None)
    assert "redone" not in merged(earlier, ended)["survived"]
    later = notes_of([0], [], facts(3, 1), None, redone=False)
    assert merged(ended, later)["survived"]["redone"] == 0
