"""Every setting and link of the pages exists, and their Python compiles.

The commands of the pages are executed or parsed by
tests/end_to_end/test_printed_commands.py.
"""

import ast
import importlib
import re
from dataclasses import fields

from orchestrator.client.run import current_run
from orchestrator.config.changes import flat
from orchestrator.config.schema import Config, plain
from orchestrator.report.run_tables import print_closing
from orchestrator.rundir.metrics import History
from tests.docs.printed import ROOT, blocks, inline, links, python_blocks
from tests.report.conftest import Screen, record, result


def test_the_end_of_make_run_is_what_the_readme_shows():
    sample = next(text for _, text in blocks(ROOT / "README.md") if text.startswith("update 120"))
    shown = [re.split(r" {2,}", line.strip())[0] for line in sample.splitlines()]
    screen = Screen()
    memory = {"parameters": 1024, "gradients": 1024, "optimizer": 2048}
    history = History([record(n) for n in range(20)])
    plan = {"updates": 20, "collectives_per_update": 1}
    ended = result(memory=memory, metrics={"accuracy": 0.9, "loss": 0.1})
    print_closing(ended, history, ROOT, screen, plan=plan)
    printed = [re.split(r" {2,}", line.strip())[0] for line in screen.text.splitlines()]
    assert shown[0].startswith("update 120/120")
    assert shown[1:] == printed[: len(shown) - 1]


# ------------------------------------------------------------------ settings


def test_every_setting_with_a_section_exists():
    sections = {field.name for field in fields(Config)} - {"job", "optimizer", "transport"}
    known = set(dict(flat(plain(Config()))))
    named = re.compile(rf"\+?((?:{'|'.join(sections)})\.[a-z_]+(?:\.[A-Z_a-z]+)*)(?![\w(/])")
    wrong = [
        str(printed)
        for printed in inline()
        for key in named.findall(printed.text)
        if not key.endswith((".py", ".yaml", ".md", ".json"))
        and ".".join(key.split(".")[:2]) not in known
        and not (ROOT / "orchestrator" / key.replace(".", "/")).with_suffix(".py").exists()
        and not hasattr(current_run, key.removeprefix("run."))  # as programs.md calls it
    ]  # fmt: skip
    assert not wrong


# ------------------------------------------------------------------ code, files, links


OURS = ("orchestrator", "jobs", "slurm")


def test_every_block_of_python_compiles_and_what_it_imports_of_ours_is_there():
    found = python_blocks()
    assert len(found) > 10
    for printed in found:
        tree = ast.parse(printed.text, filename=printed.page)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(OURS):
                public = node.module.count(".") < 2 or "mathematics.md" in printed.page
                assert public, printed
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), printed


def test_every_link_within_the_project_leads_somewhere():
    for page, target in links():
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page}: {target}"
