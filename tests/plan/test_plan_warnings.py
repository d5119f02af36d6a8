"""Warnings of a plan: each at its boundary, and none beyond it."""

import pytest

from orchestrator.units import named_ranks
from tests.plan.stated import make_plan

IDLE = "rank 3 of 4 will be idle: there is no work for them in an update of 3 samples"
MORE = "accumulation.global_batch=50 is more than the 49 samples of the data set: an update holds "
UNEVEN = "9 leaves do not divide evenly: 1 of 4 ranks take 3 and the others wait for them"
FILLED = "; accumulation.global_batch=96 would fill all ranks at accumulation.micro_batch=8"
LEAVES = {"global_batch": 65, "micro_batch": 8, "reduction": "reproducible"}
SMALL = {"global_batch": 50, "dataset_samples": 49}
SCALED = {**SMALL, "scaling": "linear", "base_batch": 10}
DROP = {"global_batch": 50, "dataset_samples": 120, "ragged": "drop"}
WARM = {"global_batch": 50, "updates": 4, "warmup_updates": 5}
LEFT_OUT = "accumulation.ragged=drop leaves 20 of 120 samples out of each epoch"


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"global_batch": 3, "steps": 1}, [IDLE]),
        (
            {"global_batch": 10, "micro_batch": 5, "reduction": "reproducible"},
            [
                (
                    "ranks 2-3 of 4 will be idle: there is no work for them in an update of 10 "
                    "samples in leaves of 5"
                ),
                (
                    "2 leaves do not divide evenly: 2 of 4 ranks take 1 and the others wait for "
                    "them; "
                    "accumulation.global_batch=20 would fill all ranks at "
                    "accumulation.micro_batch=5"
                ),
            ],
        ),
        (
            {"global_batch": 3},
            [
                IDLE,
                (
                    "accumulation.steps=4 is more than the samples of a rank, which are 1 at most: "
                    "it takes 1 micro-step"
                ),
            ],
        ),
        (
            {"global_batch": 8, "steps": 5},
            [
                (
                    "accumulation.steps=5 is more than the samples of a rank, which are 2 at most: "
                    "it takes 2 micro-steps"
                )
            ],
        ),
        ({"global_batch": 8, "steps": 2}, []),
        (
            {"global_batch": 100, "micro_batch": 5, "dataset_samples": 30},
            [
                (
                    "an update holds 30 samples, fewer than accumulation.global_batch=100: it "
                    "takes 2 micro-steps of at most 5, not 5"
                ),
                (
                    "accumulation.global_batch=100 is more than the 30 samples of the data set: an "
                    "update holds 30"
                ),
            ],
        ),
        ({**LEAVES, "global_batch": 64}, []),
        (LEAVES, [UNEVEN + FILLED]),
        ({**LEAVES, "dataset_samples": 96}, [UNEVEN + FILLED]),
        ({**LEAVES, "dataset_samples": 95}, [UNEVEN]),
        ({**LEAVES, "dataset_samples": 95, "ragged": "carry"}, [UNEVEN + FILLED]),
        (SMALL, [MORE + "49"]),
        ({**SMALL, "dataset_samples": 50}, []),
        (SCALED, [MORE + "49, while the learning rate is scaled for 50"]),
        ({**SCALED, "own_rate": True}, [MORE + "49"]),
        ({**SMALL, "ragged": "carry"}, [MORE + "some samples more than once"]),
        ({**SMALL, "ragged": "carry", "dataset_samples": 50}, []),
        ({**DROP, "updates": 1}, []),
        ({**DROP, "updates": 2}, [LEFT_OUT]),
        ({**DROP, "updates": 4}, [LEFT_OUT + " (others each time)"]),
        ({**DROP, "updates": 4, "dataset_samples": 100}, []),
        ({**DROP, "updates": 4, "ragged": "update"}, []),
        (
            WARM,
            [
                (
                    "schedule.warmup_updates=5 is more than the 4 updates of the run: the learning "
                    "rate never reaches its peak"
                )
            ],
        ),
        ({**WARM, "warmup_updates": 4}, []),
        ({**WARM, "own_rate": True}, []),
        ({**WARM, "updates": None}, []),
    ],
)
def test_a_plan_warns_of_this_in_these_words_and_of_no_more(stated, expected):
    assert list(make_plan(nodes=2, ranks_per_node=2, **stated).warnings) == expected


def test_ranks_are_named_in_eight_runs_at_most():
    words = "ranks 0-1, 3, 5, 7, 9, 11, 13, 15 and 3 more groups"
    assert named_ranks([0, *range(1, 22, 2)]) == words


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"kind": "slurm", "gpus_per_node": "a100:4"},
            [
                (
                    "cluster.gpus_per_node=a100:4, but cluster.ranks_per_node=2: each node has 2 "
                    "idle GPUs, as each rank uses one; try cluster.ranks_per_node=4"
                )
            ],
        ),
        ({"kind": "slurm", "gpus_per_node": 2}, []),
        ({"kind": "slurm"}, []),
        ({"kind": "local", "gpus_per_node": 4}, []),
    ],
)
def test_a_plan_warns_of_gpus_without_a_rank(given, expected):
    assert list(make_plan(global_batch=8, steps=1, **given).warnings) == expected
