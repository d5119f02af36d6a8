"""Requirements on every transport of torch: groups of processes that form as those of a run do.

    class TestMine(TransportSuite):
        @pytest.fixture
        def transport(self):
            return "mine"

The fixture gives its name among the entry points. Ranks are processes of this machine, each on a
simulated node with a loopback address of its own.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.engine.conformance import expect
from orchestrator.engine.torch.conformance import TorchArrays, all_checks
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.errors import PeerLost
from orchestrator.local_ranks.processes import run_ranks

LOST_AFTER_S = 3.0


def _without_the_last(group: BaseGroup) -> str:
    group.barrier()
    if group.rank == group.size - 1:
        return "left"
    try:
        group.all_reduce_sum(TorchArrays(group.device).make([1.0], [1]))
    except PeerLost:
        return "lost"
    return "nothing was raised"


class TransportSuite:
    """Tests of one transport; see the module."""

    def test_two_ranks_pass_the_suite_of_groups(self, transport: str, tmp_path: Path) -> None:
        expect(run_ranks(2, tmp_path, all_checks, transport=transport), [transport] * 2, "names")

    def test_three_ranks_pass_the_suite_of_groups(self, transport: str, tmp_path: Path) -> None:
        expect(run_ranks(3, tmp_path, all_checks, transport=transport), [transport] * 3, "names")

    def test_a_single_rank_passes_the_suite_of_groups(self, transport: str, tmp_path: Path) -> None:
        expect(run_ranks(1, tmp_path, all_checks, transport=transport), [transport], "names")

    def test_a_lost_peer_is_reported_to_the_others(self, transport: str, tmp_path: Path) -> None:
        observed = run_ranks(
            2, tmp_path, _without_the_last, transport=transport, collective_timeout_s=LOST_AFTER_S
        )
        expect(observed, ["lost", "left"], "what the ranks observe")
