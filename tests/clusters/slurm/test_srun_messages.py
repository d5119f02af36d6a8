"""srun's words on tasks that ended badly, as values."""

import pytest

from orchestrator.slurm_client import TaskEnd, numbers, task_ends


def test_tasks_are_read_in_srun_s_order_and_each_with_its_node():
    log = (
        "before\n"
        "srun: error: gpu-7: tasks 0,2-4: Exited with exit code 1 \n"
        "srun: error: vm: task 9: Segmentation fault (core dumped)\n"
        "slurmstepd: error: task 5: nothing of srun's\n"
    )
    exited = [TaskEnd(rank=n, node="gpu-7", what="Exited with exit code 1") for n in (0, 2, 3, 4)]
    crashed = TaskEnd(rank=9, node="vm", what="Segmentation fault (core dumped)")
    assert task_ends(log) == [*exited, crashed]


@pytest.mark.parametrize(
    ("listed", "found"), [("0", [0]), ("0,2-4", [0, 2, 3, 4]), ("7-7,1", [7, 1])]
)
def test_a_list_of_tasks_is_read_with_its_ranges(listed, found):
    assert list(numbers(listed)) == found


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("Exited with exit code 5", "exited with code 5"),
        ("Exited with exit code 143", "exited with code 143"),
        ("Exited with exit code 138", "exited with code 138"),
        ("Exited with exit code 137", "exited with code 137"),
        ("Terminated", "killed by signal 15 (SIGTERM)"),
        ("User defined signal 2", "killed by signal 12 (SIGUSR2)"),
        ("Killed", "killed by signal 9 (SIGKILL)"),
        ("Segmentation fault (core dumped)", "killed by signal 11 (SIGSEGV)"),
        ("Out Of Memory", "ended: Out Of Memory"),
    ],
)
def test_the_end_of_a_task_is_described_by_its_code_or_signal(what, words):
    assert TaskEnd(rank=0, node="vm", what=what).words == words
