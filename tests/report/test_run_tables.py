"""Tables of one run, as people read them."""

from pathlib import Path

import pytest

from orchestrator.report.run_tables import print_closing, print_plan
from orchestrator.rundir.files import write_json
from orchestrator.rundir.metrics import History
from tests.plan.stated import make_plan
from tests.report.conftest import Screen, record, result


def show(plan, **options):
    screen = Screen(**options)
    print_plan(plan, screen)
    return screen.text


def test_equal_ranks_share_a_row():
    plan = make_plan(nodes=30, ranks_per_node=8, global_batch=3072, micro_batch=10)
    text = " ".join(show(plan.to_json()).split())
    assert "240 ranks on 30 nodes" in text
    assert "3,072 samples in 2 micro-steps of at most 10 samples" in text
    assert "ranks 0-191 13 samples = 7+6 ranks 192-239 12 samples = 6+6" in text


def test_what_is_unknown_says_why():
    text = show(make_plan(nodes=1, ranks_per_node=2, global_batch=8, steps=2).to_json())
    assert "unknown (the data set is not looked at here)" in text
    assert "unknown (the model is not built here)" in text


def test_what_is_known_is_shown():
    plan = make_plan(nodes=1, ranks_per_node=2, global_batch=8, steps=2, dataset_samples=80,
                     parameters=1000, base_lr=0.1, warmup_updates=2, decay="cosine")  # fmt: skip
    text = show(plan.to_json())
    assert "unknown" not in text.partition("run folder")[0]
    assert "10 (1 epoch)" in text
    assert "peak 0.1" in text
    assert "per update and rank" in text


def test_idle_ranks_and_warnings_are_shown_with_their_brackets():
    plan = make_plan(nodes=1, ranks_per_node=3, global_batch=2, steps=1).to_json()
    text = show({**plan, "warnings": ["see [accumulation]"]})
    assert "idle" in text
    assert "warning: see [accumulation]" in text


def test_ten_thousand_unlike_ranks_fit_a_screen():
    plan = {"ranks": 10000, "nodes": 1250, "micro_batches": [[n % 97 + 1] for n in range(10000)]}
    lines = show(plan).splitlines()
    assert len(lines) < 30
    assert "and 85 more groups (see --json)" in " ".join(lines)
    assert all(len(line) <= 80 for line in lines)


FOLDER = Path("runs/a very long name of a folder") / ("x" * 90)
CULPRIT = {
    "rank": 2,
    "node": "node1",
    "cause": "killed by SIGKILL [9]",
    "log_tail": "start\n\x1b[31m[rank 2] [/bold] boom\x1b[0m\r\n" + "y" * 200 + "\n",
}


def closing(screen, plan=None, history=None, **changes):
    history = History([record(n) for n in range(20)]) if history is None else history
    print_closing(result(**changes), history, FOLDER, screen, plan=plan)
    return screen.text


def flat(text):
    return " ".join(text.split())


def test_a_finished_run_says_what_it_did_and_cost(screen):
    text = flat(
        closing(
            screen,
            plan={"updates": 20, "collectives_per_update": 1},
            memory={"parameters": 1024, "gradients": 2048, "optimizer": None},
        )
    )
    for part in (
        "state finished",
        "updates 20 of 20",
        "samples 5,120",
        "final loss 0.0500",
        "held-out accuracy 0.9534",
        "time 4.50 s",
        "speed 1,280 samples/s",
        "compute 75.0%, wait 15.0%, optimizer 5.0%, other 5.0%",
        "collectives per update 1, as planned",
        "2.00 MiB per update",
        "peak memory 350 MiB",
        "of which parameters 1.00 KiB",
        "sha256 0123456789abcdef",
        "python -m orchestrator compare 'runs/a very",
    ):
        assert part in text
    assert "optimizer unknown" not in text


def test_paths_and_commands_stay_in_one_piece_at_80_columns(screen):
    lines = closing(screen, state="stopped").splitlines()
    assert f"run folder: {FOLDER}" in lines
    assert f"to go on from here: python -m orchestrator resume '{FOLDER}'" in lines


def test_a_run_that_was_stopped_by_others_says_why(screen):
    assert "it was stopped: preempted" in closing(screen, state="stopped", why="preempted")


def test_an_update_that_was_skipped_gathers_no_weights(screen):
    taken = [record(n, collectives=9) for n in range(3)]
    plan = {"collectives_per_update": 9, "gathers_per_update": 4}
    for fewer, said in ((5, "5 to 9, as planned"), (6, "MISMATCH")):
        skipped = record(3, collectives=fewer, applied=False)
        text = flat(closing(screen, plan, History([*taken, skipped])))
        assert f"collectives per update {said}" in text


def test_compilation_is_told_apart_from_steady_micro_steps(screen):
    first = record(0, compile_s=2.0, plain_step_s=0.26, compute_s=0.5)
    later = [record(n, compute_s=0.08, micro_steps=4) for n in range(1, 20)]
    text = flat(closing(screen, history=History([first, *later])))
    assert "compilation 2.00 s, in 1 update" in text
    assert "20.0 ms compiled, 260 ms without: 13 times as fast" in text


def test_skipped_updates_are_counted(screen):
    skipped = [record(n, applied=False, loss_scale=2.0 ** (12 - n)) for n in range(3)]
    text = flat(closing(screen, history=History([*skipped, record(3, loss_scale=512.0)])))
    assert "not applied 3 updates, not finite; loss scale 4096 to 512" in text


def test_a_run_that_talked_too_much_says_so_loudly(screen):
    history = History([record(n, collectives=1 if n < 5 else 4) for n in range(20)])
    text = flat(closing(screen, history=history, planned_collectives_per_update=1))
    assert "MISMATCH: 1 to 4 measured, 1 planned (15 of 20 updates, first in update 6)" in text
    assert "as planned" not in text


def test_what_only_some_windows_need_is_no_mismatch(screen):
    records = [record(0, collectives=2, exchanges=1), record(1, collectives=1)]
    text = flat(closing(screen, history=History(records), plan={"collectives_per_update": 1}))
    assert "collectives per update 1, as planned, and 1 exchange of used parameters" in text


def test_each_update_is_held_against_the_plan_of_the_ranks_that_did_it(screen):
    records = [
        record(0, collectives=1), record(1, collectives=0, planned_collectives=0),
        record(2, collectives=0),
        record(3, collectives=1, planned_collectives=1), record(4, collectives=1),
    ]  # fmt: skip
    plan = {"collectives_per_update": 1}
    assert "0 to 1, as planned" in flat(closing(screen, plan, History(records)))
    records[2]["collectives"] = 1
    assert "(1 of 5 updates, first in update 3)" in flat(closing(screen, plan, History(records)))


def test_who_went_away_after_the_last_update_is_named_and_nothing_counts_as_redone(screen):
    why = ["on node0: killed by signal 9 (SIGKILL)"]
    gone = {"generation": 1, "gone": [0], "why": why, "ranks": 3, "seconds": 0.1}
    last = {**gone, "gone": [2], "why": ["on node1: its agent is gone"], "ranks": 2, "redone": 0}
    text = flat(closing(screen, survived=[gone, last]))
    assert "ranks 0, 2 lost; 1 update redone;" in text
    assert "rank 0 on node0: killed by signal 9 (SIGKILL)" in text
    assert "rank 2 on node1: its agent is gone" in text


def test_a_failed_run_names_its_culprit_and_how_to_try_again(screen):
    text = closing(screen, state="failed", culprit=CULPRIT, weights_sha256=None)
    assert "rank 2 on node1 failed first: killed by SIGKILL [9]" in text
    assert "last lines of rank 2" in text
    node = closing(screen, state="failed", culprit={**CULPRIT, "rank": None})
    assert "last lines of node1" in node
    assert "[rank 2] [/bold] boom" in text
    assert "\x1b" not in text
    assert f"to try again: python -m orchestrator resume '{FOLDER}'" in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(FOLDER) not in line)


def test_a_failed_run_without_a_culprit_says_that_too(screen):
    assert "which rank failed first is unknown" in closing(screen, state="failed")


def test_a_run_that_did_no_update_is_told_without_inventing_figures(screen):
    text = flat(
        closing(
            screen,
            history=History(),
            state="failed",
            updates=0,
            samples=0,
            loss=None,
            metrics={},
            peak_memory_bytes=[],
            collectives=0,
            bytes_on_wire=0,
            seconds=1.0,
        )
    )
    assert "updates 0" in text
    assert "unknown" not in text.partition("run folder")[0]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_is_wider_than_the_screen_but_what_may_be_copied(width):
    text = closing(Screen(width=width), plan={"collectives_per_update": 2})
    assert all(len(line) <= width for line in text.splitlines() if str(FOLDER) not in line)


def test_a_stream_of_ascii_gets_ascii_also_from_logs():
    culprit = {**CULPRIT, "log_tail": ["größer ≤ 3", "…"]}
    assert closing(Screen(encoding="ascii"), state="failed", culprit=culprit).isascii()


@pytest.mark.parametrize(
    ("cause", "node", "offered"),
    [("killed by SIGKILL", "n3", True), ("NCCL error: unhandled", "n3", True),
     ("ValueError: no", "n3", False), ("killed by SIGKILL", "batch", False)],
)  # fmt: skip
def test_a_failure_of_hardware_offers_to_exclude_its_node(screen, made, cause, node, offered):
    culprit = {"rank": 2, "node": node, "cause": cause, "log_tail": []}
    run = made("run", ended=result(state="failed", culprit=culprit))
    write_json(run.handle, {"job_id": "7"})
    print_closing(run.read_result(), History([]), run.path, screen)
    assert ("cluster.exclude=n3" in screen.text) == offered
