"""`balance=measured`: all ranks agree on speeds that follow what they were seen to do."""

import threading

import pytest

from orchestrator.client.balance import (
    INTERVAL,
    MeasuredSpeeds,
    known_speed,
    node_digest,
    speeds_of,
)
from orchestrator.errors import JobError
from orchestrator.plan.window import planner_of
from tests.plan.stated import make_plan

pytestmark = [
    pytest.mark.whole_runs,
    pytest.mark.filterwarnings("ignore:it works at"),  # in threads
]

AHEAD = 3
PLAN = {"nodes": 1, "dataset_samples": 960, "global_batch": 48, "steps": 4, "updates": 80}


class Ranks:
    """Ranks in threads, of which each takes as long as its true speed says."""

    def __init__(self, true_speeds):
        self.true, self.rows, self.exchanges = list(true_speeds), {}, 0
        self.planner = planner_of(make_plan(**PLAN, ranks_per_node=len(self.true)))
        self.barrier = threading.Barrier(len(self.true))
        self.all = [
            MeasuredSpeeds(rank, 0, AHEAD, lambda numbers, rank=rank: self.gather(rank, numbers))
            for rank in range(len(self.true))
        ]

    def gather(self, rank, numbers):
        self.rows[rank] = list(numbers)
        self.barrier.wait()
        rows = [self.rows[other] for other in range(len(self.true))]
        self.barrier.wait()
        self.exchanges += rank == 0
        return rows

    def update(self, number):
        """Compute an update; return what the busiest rank takes to what it would take at best."""
        split = self.planner.assignment(number, self.all[0].at(number))
        sizes = split.samples_per_rank
        seconds = [size / speed for size, speed in zip(sizes, self.true, strict=True)]

        def be(rank):
            self.all[rank].add(number, seconds=seconds[rank], cost=float(sizes[rank]))

        threads = [threading.Thread(target=be, args=[rank]) for rank in range(len(self.true))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({speeds.at(number + AHEAD) for speeds in self.all}) == 1
        return max(seconds) / (split.samples / sum(self.true))


def test_work_follows_a_rank_that_is_slow_and_one_that_recovers():
    ranks = Ranks([1.0, 0.5, 1.0])
    first = [ranks.update(number) for number in range(20)]
    delay = INTERVAL + AHEAD
    assert min(first[:delay]) > 1.6
    assert max(first[delay:]) < 1.1
    ranks.true = [1.0, 1.0, 0.25]
    then = [ranks.update(number) for number in range(20, 40)]
    assert max(then[2 * INTERVAL + AHEAD :]) < 1.1
    assert ranks.exchanges == 40 // INTERVAL
    assert len(ranks.all[0].changes) <= 4


def test_equal_ranks_keep_the_even_division():
    ranks = Ranks([1.0, 1.02, 0.99])
    assert [ranks.update(number) for number in range(12)][-1] < 1.04
    assert ranks.all[0].changes == []


def test_a_rank_that_nearly_stands_still_has_work_and_is_seen_to_recover():
    ranks = Ranks([1.0, 1e-6, 1.0])
    for number in range(12):
        ranks.update(number)
    assert ranks.planner.assignment(12, ranks.all[0].at(12)).samples_per_rank[1] == 1
    ranks.true = [1.0, 1.0, 1.0]
    assert [ranks.update(number) for number in range(12, 40)][-1] < 1.05


def test_a_rank_without_work_gets_more_until_it_is_measured():
    assert speeds_of([[1.0, 4.0], [0.0, 0.0]], [1.9, 0.1])[1] == pytest.approx(0.1, abs=0.06)
    assert speeds_of([[0.0, 0.0], [0.0, 0.0]], [1.5, 0.5]) == (1.5, 0.5)


def test_a_loader_that_reads_too_far_ahead_is_told():
    speeds = MeasuredSpeeds(0, 10, AHEAD, lambda _: [])
    assert speeds.at(10 + INTERVAL + AHEAD - 1) is None
    with pytest.raises(JobError, match="balance=measured, 3 updates ahead"):
        speeds.at(10 + INTERVAL + AHEAD)


def test_a_long_run_keeps_only_the_speeds_that_windows_still_need():
    ranks = Ranks([1.0, 1.0])
    for number in range(60):
        ranks.true = [1.0, 0.4 if number // INTERVAL % 2 else 1.0]
        ranks.update(number)
    assert 1 < len(ranks.all[0].changes) <= 2 + AHEAD


def test_a_new_group_begins_with_the_speeds_that_its_ranks_know():
    """Rank 1 is lost; rank 2, which is slow, goes on beside one that is new on another node."""
    here = node_digest()
    before = [[1.2, here], [1.2, here], [0.6, here], [1.0, here + 1]]
    assert [known_speed(before, rank) for rank in (0, 2, 9)] == [1.2, 0.6, 1.0]
    assert known_speed([[1.5, here + 1]], 0) is None
    rows = [[1.2, here], [0.6, here], [0.0, here + 1]]
    speeds = MeasuredSpeeds.begin(1, 20, AHEAD, lambda _: rows, known=0.6)
    # The new one counts as the mean of those that are known, 0.9.
    assert speeds.at(20) == pytest.approx([1.2 / 0.9, 0.6 / 0.9, 1.0])
    assert speeds.began_at(20) == speeds.at(20)
    assert speeds.own == speeds.at(20)[1]


def test_the_rows_for_checkpoints_follow_new_speeds():
    numbers = [[1.0, 4.0], [4.0, 4.0]]
    speeds = MeasuredSpeeds.begin(0, 0, AHEAD, lambda _: [[0.0, 1.0], [0.0, 2.0]], known=None)
    assert speeds.rows == [[1.0, 1.0], [1.0, 2.0]]
    assert speeds.at(0) is None
    rows, speeds.gather = speeds.rows, lambda _: numbers
    for update in range(INTERVAL):
        speeds.add(update, seconds=0.25, cost=1.0)
    assert rows == [[1.6, 1.0], [0.4, 2.0]]


def test_slow_rank_of_a_script(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    rows = [[1.0, 4.0], [4.0, 4.0]]
    speeds = MeasuredSpeeds(1, 0, AHEAD, lambda _: rows, setting="balance='measured'")
    for update in range(4 * INTERVAL - 1):
        speeds.add(update, seconds=1.0, cost=1.0)
    said = r"rank 1: it works at 0\.40 .* \(balance='measured'\); its node, "
    with pytest.warns(UserWarning, match=said):
        speeds.add(4 * INTERVAL - 1, seconds=1.0, cost=1.0)
