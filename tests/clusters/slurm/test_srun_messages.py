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
    ("what", "words", "stopped"),
    [
        ("Exited with exit code 5", "exited with code 5", False),
        ("Exited with exit code 143", "exited with code 143", True),
        ("Exited with exit code 138", "exited with code 138", True),
        ("Exited with exit code 137", "exited with code 137", False),
        ("Terminated", "killed by signal 15 (SIGTERM)", True),
        ("User defined signal 2", "killed by signal 12 (SIGUSR2)", True),
        ("Killed", "killed by signal 9 (SIGKILL)", False),
        ("Segmentation fault (core dumped)", "killed by signal 11 (SIGSEGV)", False),
        ("Out Of Memory", "ended: Out Of Memory", False),
    ],
)
def test_an_end_is_told_in_our_words_and_as_a_stop_where_it_is_one(what, words, stopped):
    end = TaskEnd(rank=0, node="vm", what=what)
    assert (end.words, end.stopped) == (words, stopped)
