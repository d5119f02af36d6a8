"""A job's `cost()`: ranks that would deal work differently are refused before the first update."""

import numpy as np
import pytest

from orchestrator import JobError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.cost import TokenBudget, WorkByCost
from orchestrator.trainer.same_inputs import refuse_different_costs
from tests.engine.torch.jobs import Curve, engine_of
from tests.refusals import refused

pytestmark = pytest.mark.whole_runs


def compare(cost_of_rank):
    def rank(group):
        budget = TokenBudget(micro_tokens=40, cost=cost_of_rank(group.rank))
        work = WorkByCost(np.arange(1, 20), budget)
        refuse_different_costs(engine_of(Curve(), group), Curve(), work)

    run_in_threads(3, rank)


def test_a_cost_that_depends_on_the_rank_is_refused():
    with refused(JobError, "Curve.cost() rank 2"):
        compare(lambda rank: lambda length, samples: length * samples + (rank == 2))


@pytest.mark.parametrize("cost", [None, lambda length, samples: samples * length**2])
def test_equal_costs_are_accepted(cost):
    compare(lambda _: cost)
