"""What `survive` makes of a run's records: when a loss was noticed, and what it cost."""

import pytest

from benchmarks import survive
from benchmarks.measure import Spread


def test_a_loss_costs_from_the_beginning_of_the_broken_window_to_the_next_group():
    records = [
        {"update": 0, "time": 10.0, "update_s": 1.0, "loss": 1.0},
        {"update": 1, "time": 12.0, "generation": 1, "survived": {"seconds": 0.5}},
        {"update": 1, "time": 13.0, "update_s": 1.0, "loss": 1.0},
        {"update": 2, "time": 14.0, "update_s": 1.0, "loss": 1.0},
    ]
    (one,) = survive.losses(records, [(11.25, 3)])
    assert one == {"rank": 3, "noticed": 0.25, "back": 0.75, "lost": 2.0}
    updates = [one for one in records if "loss" in one]
    assert survive.useful(updates) == {"whole": 5.0, "useful": 3.0}
    with pytest.raises(ValueError, match="shorter"):  # a kill that nobody noted is no loss of zero
        list(survive.losses(records[:1], [(11.25, 3)]))


def test_a_contender_that_is_not_installed_says_so_in_its_row():
    spread = Spread.of([1.0]).rounded()
    row = {
        "name": "ours",
        "kills": 3,
        "useful": 0.9,
        "lost": 0.3,
        "equal": "1 of 1 runs",
        "why": "",
    }
    absent = {"name": "torchft", "kills": 0, "useful": None, "equal": "-", "why": "not installed"}
    cost = {"name": survive.WITH, "ratio": spread}
    text = survive.body({
        "cost": {key: [cost] for key in ("seconds", "processor")},
        "losses": dict.fromkeys(("noticed", "back", "lost"), spread), "goodput": [row, absent],
    })  # fmt: skip
    assert "| ours | 3 | 90.0% | 0.30 | 1 of 1 runs |" in text
    assert "| torchft | 0 | not installed | - | - |" in text
