"""Tables of one run, as people read them."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.agent.agent_registry import AGENT_GONE
from orchestrator.report.run_tables import print_closing, print_plan
from orchestrator.report.terminal import command, harmless, say
from orchestrator.rundir.files import write_json
from orchestrator.rundir.metrics import History
from orchestrator.rundir.outcome import COMPUTED_WRONGLY
from tests.plan.stated import make_plan
from tests.run_folders import Screen, record, result


def flat(text):
    return " ".join(text.split())


def show(plan, **options):
    screen = Screen(**options)
    print_plan(plan, screen)
    return screen.text


PLANS = {
    "equal ranks share a row": (
        {"nodes": 30, "ranks_per_node": 8, "global_batch": 3072, "micro_batch": 10},
        [
            "240 ranks on 30 nodes",
            "3,072 samples in 2 micro-steps of at most 10 samples",
            "ranks 0-191 13 samples = 7+6 ranks 192-239 12 samples = 6+6",
        ],
    ),
    "what is unknown says why": (
        {"nodes": 1, "ranks_per_node": 2, "global_batch": 8, "steps": 2},
        ["unknown (the data set is not looked at here)", "unknown (the model is not built here)"],
    ),
    "what is known is shown": (
        {
            "nodes": 1,
            "ranks_per_node": 2,
            "global_batch": 8,
            "steps": 2,
            "dataset_samples": 80,
            "parameters": 1000,
            "base_lr": 0.1,
            "warmup_updates": 2,
            "decay": "cosine",
        },
        ["10 (1 epoch)", "peak 0.1", "per update and rank"],
    ),
    "a batch that grows has a row for each stage": (
        {
            "nodes": 1,
            "ranks_per_node": 2,
            "global_batch": 8,
            "steps": 2,
            "scaling": "linear",
            "batch_schedule": [[5, 16], [1000, 40]],
            "base_lr": 0.1,
            "base_batch": 8,
            "samples": 900,
            "dataset_samples": 80,
            "parameters": 1000,
        },
        [
            "8 samples in 2 micro-steps",
            "from update 5 on 16 samples in 4 micro-steps, peak rate 0.2",
            (
                "from update 1,000 on 40 samples in 10 micro-steps, peak rate 0.5 "
                "(schedule.scaling=lin"
            ),
            "updates 60 (",
            "900 samples)",
            "updates in epoch 0 8",
        ],
    ),
    "ranks without samples": (
        {"nodes": 1, "ranks_per_node": 3, "global_batch": 2, "steps": 1},
        ["idle", "warning: see [accumulation]"],
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_plan_and_its_warnings(case):
    stated, parts = PLANS[case]
    text = flat(show({**make_plan(**stated).to_json(), "warnings": ["see [accumulation]"]}))
    for part in parts:
        assert part in text
    known = "unknown" not in text.partition("run folder")[0]
    assert known == ("dataset_samples" in stated)


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
    "log_tail": ["start", "\x1b[31m[rank 2] [/bold] boom\x1b[0m\r", "y" * 200],
}


def closing(screen, plan=None, history=None, **changes):
    history = History([record(n) for n in range(20)]) if history is None else history
    print_closing(result(**changes), history, FOLDER, screen, plan=plan)
    return screen.text


def test_the_table_has_the_metrics_of_the_last_update(screen):
    history = History([record(n, metrics={"right": n / 20}) for n in range(20)])
    assert "final loss 0.0500 final right 0.9500 held-out" in flat(closing(screen, history=history))


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
        "speed of updates 1,280 samples/s",
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


def test_a_stopped_run_says_why_with_a_command_in_one_piece(screen):
    lines = closing(screen, state="stopped", why="preempted").splitlines()
    assert f"run folder: {FOLDER}" in lines
    assert "it was stopped: preempted" in lines
    assert f"to go on from here: python -m orchestrator resume '{FOLDER}'" in lines


CLOSINGS = {
    "compilation apart from steady micro-steps": (
        [
            record(0, compile_s=2.0, plain_step_s=0.26, compute_s=0.5),
            *(record(n, compute_s=0.08, micro_steps=4) for n in range(1, 20)),
        ],
        {},
        "compilation 2.00 s, in 1 update a micro-step 20.0 ms compiled, 260 ms without: 13 times",
    ),
    "skipped updates": (
        [
            *(record(n, applied=False, loss_scale=2.0 ** (12 - n)) for n in range(3)),
            record(3, loss_scale=512.0),
        ],
        {},
        "not applied 3 updates, not finite; loss scale 4096 to 512",
    ),
    "no gathered weights for a skipped update": (
        [record(0, collectives=9), record(1, collectives=5, applied=False)],
        {"collectives_per_update": 9, "gathers_per_update": 4},
        "collectives per update 5 to 9, as planned",
    ),
    "too few gathered weights": (
        [record(0, collectives=9), record(1, collectives=6, applied=False)],
        {"collectives_per_update": 9, "gathers_per_update": 4},
        "MISMATCH",
    ),
    "too many collectives": (
        [record(n, collectives=1 if n < 5 else 4) for n in range(20)],
        {"collectives_per_update": 1},
        "MISMATCH: 1 to 4 measured, 1 planned (15 of 20 updates, first in update 6)",
    ),
    "exchanges that only some windows need": (
        [record(0, collectives=2, exchanges=1), record(1, collectives=1)],
        {"collectives_per_update": 1},
        "collectives per update 1, as planned, and 1 exchange of used parameters",
    ),
    "each update by the plan of its ranks": (
        [
            record(0),
            record(1, collectives=0, planned_collectives=0),
            record(2, collectives=0),
            record(3, planned_collectives=1),
            record(4),
        ],
        {"collectives_per_update": 1},
        "0 to 1, as planned",
    ),
    "another number than that of its ranks": (
        [record(0), record(1, collectives=0, planned_collectives=0), record(2, collectives=1)],
        {"collectives_per_update": 1},
        "(1 of 3 updates, first in update 3)",
    ),
}


@pytest.mark.parametrize("case", CLOSINGS)
def test_the_records_of_updates_are_summed_up(screen, case):
    records, plan, said = CLOSINGS[case]
    assert said in flat(closing(screen, plan, History(records)))


def test_rank_lost_after_the_last_update(screen):
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


def test_run_without_updates_has_no_figures(screen):
    nothing = dict.fromkeys(("updates", "samples", "collectives", "bytes_on_wire"), 0)
    more = {"loss": None, "metrics": {}, "peak_memory_bytes": [], "seconds": 1.0}
    text = flat(closing(screen, history=History(), state="failed", **nothing, **more))
    assert "updates 0" in text
    assert "unknown" not in text.partition("run folder")[0]
    assert "which rank failed first is unknown" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_is_wider_than_the_screen_but_what_may_be_copied(width):
    text = closing(Screen(width=width), plan={"collectives_per_update": 2})
    assert all(len(line) <= width for line in text.splitlines() if str(FOLDER) not in line)


def test_a_stream_of_ascii_gets_ascii_also_from_logs():
    culprit = {**CULPRIT, "log_tail": ["größer ≤ 3", "…"]}
    assert closing(Screen(encoding="ascii"), state="failed", culprit=culprit).isascii()


@pytest.mark.parametrize(
    ("cause", "node", "offered"),
    [
        ("killed by SIGKILL", "n3", True),
        ("NCCL error: unhandled", "n3", True),
        (f"rank 2 on n3 {COMPUTED_WRONGLY} 7: …", "n3", True),
        (AGENT_GONE, "n3", True),
        ("ValueError: no", "n3", False),
        ("killed by SIGKILL", "batch", False),
    ],
)
def test_a_failure_of_hardware_offers_to_exclude_its_node(screen, made, cause, node, offered):
    culprit = {"rank": 2, "node": node, "cause": cause, "log_tail": []}
    run = made("run", ended=result(state="failed", culprit=culprit))
    write_json(run.handle, {"job_id": "7"})
    print_closing(run.read_result(), History([]), run.path, screen)
    assert ("cluster.exclude=n3" in screen.text) == offered


# ------------------------------------------------------------------ The terminal


@given(st.text())
@example("\x1b]0;title\x07x\x1b[2J\x1b(B\x9b31m")
def test_no_control_character_gets_through(text):
    assert not any(ord(c) < 32 and c != "\n" for c in harmless(text))
    assert "\x1b" not in harmless(text)


@given(st.text(alphabet=st.characters(codec="utf-8")))
@example("[/] [red]x[/red] \\[b]")
def test_any_text_can_be_said_on_any_stream(text):
    for encoding in ("ascii", "utf-8", "latin-1"):
        screen = Screen(encoding=encoding)
        say(screen, text)
        assert screen.text.endswith("\n")


def test_brackets_stay_brackets(screen):
    say(screen, "[bold]x[/bold] [/red] :smile: C:\\[dir]")
    assert screen.text == "[bold]x[/bold] [/red] :smile: C:\\[dir]\n"


def test_a_command_can_be_pasted():
    assert command("compare", Path("a b"), Path("$HOME/x")) == (
        "python -m orchestrator compare 'a b' '$HOME/x'"
    )
