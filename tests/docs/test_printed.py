"""Every setting and link of the pages exists, and their Python compiles.

The commands of the pages are executed or parsed by
tests/end_to_end/test_printed_commands.py.
"""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from dataclasses import fields

from orchestrator import Job, Loss
from orchestrator.client.run import current_run
from orchestrator.config.changes import flat
from orchestrator.config.schema import Config, plain
from orchestrator.job import COUPLED_METHODS
from orchestrator.report.run_tables import print_closing
from orchestrator.rundir.metrics import History
from tests.add_ons import ABSENT, ADD_ONS
from tests.docs.printed import ROOT, blocks, inline, links, python_blocks
from tests.docs.scripts import page_text, table
from tests.helpers import LIMIT_S
from tests.run_folders import Screen, record, result


def test_the_end_of_make_run_is_what_the_readme_shows():
    sample = next(text for _, text in blocks(ROOT / "README.md") if text.startswith("update 120"))
    shown = [re.split(r" {2,}", line.strip())[0] for line in sample.splitlines()]
    screen = Screen()
    memory = {"parameters": 1024, "gradients": 1024, "optimizer": 2048}
    history = History([record(n, metrics={"accuracy": 0.99}) for n in range(20)])
    plan = {"updates": 20, "collectives_per_update": 1}
    ended = result(memory=memory, metrics={"loss": 0.1, "accuracy": 0.9})
    print_closing(ended, history, ROOT, screen, plan=plan)
    printed = [re.split(r" {2,}", line.strip())[0] for line in screen.text.splitlines()]
    assert shown[0].startswith("update 120/120")
    assert shown[1:] == printed[: len(shown) - 1]


# ------------------------------------------------------------------ settings


def test_every_setting_in_a_message_exists():
    sections = "accumulation|cluster|facts|schedule|sweep|tracker|train"
    known = {".".join(key.split(".")[:2]) for key in flat(plain(Config()))}
    known |= {"sweep.dir", "sweep.subdir"}  # Hydra's
    named = re.compile(rf"(?<![\w./])(?:{sections})\.(?!py\b)[a-z_]{{3,}}")
    wrong = {
        f"{path.name}: {key}"
        for path in (ROOT / "orchestrator").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for key in named.findall(node.value)
        if key not in known
    }
    assert wrong == {"messages.py: accumulation.stpes"}  # an example of a misspelled key


def test_every_setting_with_a_section_exists():
    sections = {field.name for field in fields(Config)} - {"job", "optimizer", "transport"}
    known = set(flat(plain(Config())))
    named = re.compile(rf"\+?((?:{'|'.join(sections)})\.[a-z_]+(?:\.[A-Z_a-z]+)*)(?![\w(/])")
    wrong = [
        str(printed)
        for printed in inline()
        for key in named.findall(printed.text)
        if not key.endswith((".py", ".yaml", ".md", ".json"))
        and ".".join(key.split(".")[:2]) not in known
        and not (ROOT / "orchestrator" / key.replace(".", "/")).with_suffix(".py").exists()
        and key.removeprefix("run.") not in dir(current_run)  # as programs.md calls it
    ]
    assert not wrong


# ------------------------------------------------------------------ code, files, links


OURS = ("orchestrator", "jobs", "slurm")
ABSENT_MODULES = {"orchestrator." + add_on.replace("/", ".") for add_on in ABSENT}
ABSENT_PAGES = {ROOT / "docs" / (ADD_ONS[add_on].page or "") for add_on in ABSENT}


def test_every_block_of_python_compiles_and_what_it_imports_of_ours_is_there():
    found = python_blocks()
    assert len(found) > 10
    for printed in found:
        tree = ast.parse(printed.text, filename=printed.page)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(OURS):
                public = node.module.count(".") < 2 or "mathematics.md" in printed.page
                assert public, printed
                if node.module in ABSENT_MODULES:
                    continue
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), printed


def test_every_link_within_the_project_leads_somewhere():
    for page, target in links():
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if file in ABSENT_PAGES:
            continue
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page}: {target}"


# ------------------------------------------------------------------ The site


BUDGET_WORDS = 33_000


def test_the_site_builds_without_warnings_and_has_every_page(tmp_path):
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "properdocs",
            "build",
            "--strict",
            "--quiet",
            "--config-file",
            str(ROOT / "properdocs.yml"),
            "--site-dir",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert all((tmp_path / page).with_suffix(".html").exists() for page in pages)
    folders = {page.parent.name for page in pages}
    assert folders == {"", "tutorial", "how-to", "reference", "explanation"}


def test_documentation_stays_within_its_budget():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= BUDGET_WORDS


# ------------------------------------------------------------------ The reference of `Job`


PAGE = page_text("job.md")
OPTIONAL = {"learning_rate", "shard", "state_dict", "load_state_dict", *COUPLED_METHODS}


def _public(of):
    return {name for name, _ in inspect.getmembers(Job, of) if not name.startswith("_")}


def test_the_page_has_every_method_with_its_arguments():
    rows = [row[0].strip("`") for row in table(PAGE, "method")]
    signatures = {row.partition("(")[0]: row.partition("(")[2].rstrip(")") for row in rows}
    assert signatures.keys() == _public(inspect.isfunction) | OPTIONAL
    for name in signatures.keys() - OPTIONAL:
        _, *arguments = inspect.signature(getattr(Job, name)).parameters
        assert signatures[name] == ", ".join(arguments)


def test_the_page_has_every_attribute_with_its_default():
    rows = {name.strip("`"): default.strip("`") for name, default, _ in table(PAGE, "attribute")}
    attributes = _public(lambda value: not callable(value))
    assert rows == {name: repr(getattr(Job, name)).replace("'", '"') for name in attributes}


def test_the_page_has_every_field_of_a_loss():
    assert [row[0].strip("`") for row in table(PAGE, "field")] == [f.name for f in fields(Loss)]


MATHEMATICS = ROOT / "docs" / "explanation" / "mathematics.md"


def test_the_examples_of_the_page_hold():
    failed, attempted = doctest.testfile(str(MATHEMATICS), module_relative=False, encoding="utf-8")
    assert attempted >= 5
    assert failed == 0
