"""Runs as a page has them: in their order, told apart by what varies."""

import pytest

from orchestrator.errors import RunFolderError
from orchestrator.page.facts import differing, facts_of


def test_points_come_in_their_numbers_order_named_by_what_varies(sweep):
    found = facts_of(sweep)
    assert [run.name for run in found.runs] == ["steps=1", "steps=2", "steps=4"]
    assert differing(found.runs) == {"accumulation.steps": [1, 2, 4]}


def test_runs_that_differ_in_nothing_that_is_shown_have_names_of_their_own(made, tmp_path):
    for number, restarts in enumerate((0, 1)):
        for steps in (1, 2):
            told = (f"accumulation.steps={steps}", f"run.max_restarts={restarts}")
            made(f"some/{2 * number + steps}", *told)
    names = [run.name for run in facts_of(tmp_path / "some").runs]
    assert names == ["steps=1 (1)", "steps=2 (2)", "steps=1 (3)", "steps=2 (4)"]


def test_of_numbers_that_were_drawn_a_name_has_what_can_be_read(made, tmp_path):
    for number, rate in enumerate((0.012345678901, 0.012345678902, 0.5)):
        made(f"some/{number}", f"schedule.base_lr={rate}")
    names = [run.name for run in facts_of(tmp_path / "some").runs]
    assert names == ["base_lr=0.0123457 (0)", "base_lr=0.0123457 (1)", "base_lr=0.5"]


def test_a_run_by_itself_goes_by_its_folders_name(made):
    made("alone", "train.seed=3")
    [run] = facts_of(made("alone2", "train.seed=3").path).runs
    assert run.name == "alone2"


def test_a_damaged_point_is_named_and_the_others_are_shown(made, tmp_path):
    for steps in (1, 2, 4):
        made(f"some/{steps}", f"accumulation.steps={steps}")
    (tmp_path / "some" / "2" / "plan.json").write_text("{")
    found = facts_of(tmp_path / "some")
    assert [run.name for run in found.runs] == ["steps=1", "steps=4"]
    assert len(found.unreadable) == 1


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(RunFolderError):
        facts_of(tmp_path)
