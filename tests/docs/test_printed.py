"""Every command that the pages print can be typed, and every setting and file they name exists.

Nothing is trained here: commands are composed, checked and planned in this process, as far as they
come without a cluster. What cannot be held against anything is listed, with the reason.
"""

import ast
import importlib
import importlib.util
import re
from dataclasses import fields, is_dataclass

import pytest
import typer
import yaml
from omegaconf import OmegaConf

import benchmarks.__main__ as measurements
import slurm.__main__ as development
from orchestrator.__main__ import EXAMPLES, app
from orchestrator.cli.start import prepare
from orchestrator.client.run import current_run
from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer, points_of
from orchestrator.config.schema import Config
from orchestrator.plugins import PLUGIN_KINDS
from orchestrator.report.run_tables import print_closing
from orchestrator.rundir.metrics import History
from orchestrator.sweep.search import read_search
from orchestrator.sweep.sweep import checked
from tests.docs.printed import (
    PROGRAMS,
    ROOT,
    SLURMS,
    blocks,
    inline,
    links,
    python_blocks,
    shell_commands,
)
from tests.report.conftest import Screen, maker, record, result

VERBS = typer.main.get_command(app)
SLURM = typer.main.get_command(development.app)

MISSPELLED = {"+clutser=slurm": "an example of a misspelling"}
NOT_OURS = {
    "--mpi=none": "srun's",
    "SLURM_RESTART_COUNT=1": "SLURM's",
    "cred_expire=5": "SLURM's",
    "gres=npu:8": "sbatch's",
    "cluster.partition=a,b": "a list, which a sweep would take apart",
    "cluster.exclude=n[1-3],n7": "the same",
    "style=own": "short for engine.style=own, beside it",
}
"""In backquotes, like a setting, and none that could be composed as it stands."""

ELSEWHERE = {
    **dict.fromkeys(("my_jobs", "conf/mine.yaml", "job/line.yaml"), "the reader's own"),
    **dict.fromkeys(("cluster/mysite.yaml", "cluster/<site>.yaml"), "the reader's own"),
    **dict.fromkeys(("RUN/", "attempts/", "checkpoints/", "logs/"), "in a run folder"),
    **dict.fromkeys(("tensorboard/", "mlruns/", "wandb/", "submitit/", "code/"), "in a run folder"),
    "runs/": "made by runs", "SWEEP/": "in a sweep's folder",
    ".aws/": "a secret's usual place", "/": "the machine's", "~": "the account's",
    "build/": "made by `make docs`",
    "<folder>": "in a development cluster's folder", "engine/<framework>": "not yet written",
}  # fmt: skip
"""Beginnings of paths that are no files of the project."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The folder of a reader who has done what the pages say: a job, a site, some runs."""
    folder = tmp_path_factory.mktemp("reader")
    for run in ("RUN", "RUN_A", "RUN_B", "A", "B"):
        maker(folder)(run, ended=result(state="failed", updates=5))
    mine = next(p.text for p in python_blocks() if "class Line(Job)" in p.text)
    for path, text in {
        "my_jobs/__init__.py": "", "my_jobs/line.py": mine,
        "conf/job/line.yaml": "_target_: my_jobs.line.Line\n",
        "conf/mine.yaml": "defaults: [base, _self_]\n",
        **dict.fromkeys(("train.py", "train_mindspore.py", "package/train.py", "train.sh"), ""),
        "windows.py": "",
        "FOLDER/cluster/mysite.yaml": (ROOT / "conf" / "cluster" / "slurm.yaml").read_text(),
    }.items():  # fmt: skip
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "train.sh").write_text("#!/bin/sh\n")
    (folder / "train.sh").chmod(0o700)
    return folder


@pytest.fixture
def standing_there(reader, monkeypatch):
    monkeypatch.chdir(reader)
    monkeypatch.syspath_prepend(str(reader))


def composed(words):
    """Raises if a launch with these words would be refused before it starts."""
    line = read_command_line([word for word in words if not word.endswith("…")])
    composer = Composer(line)
    found = composer.compose()
    if composer.own_search:
        assert read_search(composer).trials
    elif found.sweeps:
        assert checked(points_of(composer))
    else:
        prepare(found.config())


def parsed(command, words):
    """Raises if a verb does not take these words; gives its parameters."""
    with command.make_context(command.name, list(words), resilient_parsing=False) as context:
        return context.params


def check(words):
    """Raises if the command cannot be typed."""
    program, rest = words[0], words[1:]
    if program == "python":
        assert rest[0] == "-m", words
        program, rest = rest[1], rest[2:]
    rest = [word for word in rest if word != "…"]
    if program == "orchestrator.launch" or (program == "orchestrator" and rest[:1] == ["launch"]):
        composed(rest[rest[:1] == ["launch"] :])
    elif program == "orchestrator":
        of_verb(rest)
    elif program == "slurm":
        parsed(SLURM.commands[rest[0]], rest[1:])
    elif program == "benchmarks":
        known = {*measurements.MEASUREMENTS, *measurements.BY_NAME, "tables"}
        assert {w for w in rest if w.isidentifier() and w != "N"} <= known, words
        assert {w for w in rest if w.startswith("-")} <= {"--seed", "--faults", "--quick"}, words
    elif program == "orchestrator.config.reference":  # tests/config/test_reference.py does it
        assert rest == [">", "docs/reference/configuration.md"], words
    elif program == "torch.distributed.run":
        scripts = [p.text.partition("\n")[0] for p in python_blocks()]
        assert f"# {rest[-1]}" in scripts, words
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        target, *more = rest
        assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE), words
        assert all(f"$({setting.partition('=')[0]})" in makefile for setting in more), words
    elif program == "pip":
        of_pip(rest)
    else:
        assert program in SLURMS, words  # tests/slurm uses them for real


def of_verb(words):
    if words[0].startswith("--"):
        assert words[0] in ("--help", "--install-completion", "--show-completion"), words
        return
    if "--" in words:  # a program stands after it
        assert words[0] in ("run", "launch", "plan"), words
        composed(words[1:])
        return
    params = parsed(VERBS.commands[words[0]], words[1:])
    if words[0] in ("plan", "resume"):
        overrides = [o for o in params["overrides"] or () if o.lower() != "key=value"]
        if overrides:
            composed([*["-m"] * ("-m" in words), *overrides])


def of_pip(words):
    """From the folder of the project: it is in no registry, where its name may be anybody's."""
    assert words[0] == "install", words
    extras = re.fullmatch(r"\.(?:\[(.*)\])?", words[-1])
    assert extras, words
    declared = (ROOT / "pyproject.toml").read_text()
    for extra in (extras[1] or "").split(","):
        assert not extra or f"\n{extra} = [" in declared, words


@pytest.mark.usefixtures("standing_there")
def test_every_command_in_a_shell_block_can_be_typed(tmp_path):
    found = shell_commands(tmp_path)
    assert len(found) > 30
    told = {}
    for page, words in found:
        if (line := " ".join(words)) not in told:
            told[line] = page
            explained(check, words, page)


@pytest.mark.usefixtures("standing_there")
@pytest.mark.parametrize("example", EXAMPLES.values())
def test_every_example_in_the_help_can_be_typed(example):
    check(["orchestrator", *example.split()])


def explained(function, value, page):
    """Name the page and the words when one of them is wrong."""
    try:
        function(value)
    except (Exception, SystemExit) as error:
        error.add_note(f"printed in {page}: {value}")
        raise


@pytest.mark.usefixtures("standing_there")
def test_every_command_in_mid_sentence_can_be_typed():
    found = {}
    for printed in inline():
        words = printed.text.replace("[--quick] [NAME …]", "--quick …").split()
        verb = words[0] in VERBS.commands and "RUN" in printed.text
        if len(words) > 1 and (verb or words[0] in ("--config-dir", *PROGRAMS)):
            found.setdefault(printed.text, (words, verb, printed.page))
    assert len(found) > 25
    for text, (words, verb, page) in found.items():
        if words[0] == "--config-dir":
            explained(composed, words, page)
        elif text == "python -m slurm up | down | status | env | remove":
            assert set(words[3::2]) == set(SLURM.commands)
        else:
            explained(check, ["orchestrator", *words] if verb else words, page)


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


def of_schema(key, schema=Config):
    """Whether `key`, with dots, is in the configuration's schema."""
    first, _, rest = key.partition(".")
    found = {field.name: field.type for field in fields(schema)}
    if first not in found:
        return False
    inner = getattr(schema(), first, None) if rest else None
    return not rest or (of_schema(rest, type(inner)) if is_dataclass(inner) else True)


def test_every_setting_with_a_section_exists():
    sections = {field.name for field in fields(Config)} - {"job", "optimizer", "transport"}
    named = re.compile(rf"\+?((?:{'|'.join(sections)})\.[a-z_]+(?:\.[A-Z_a-z]+)*)(?![\w(/])")
    wrong = [
        str(printed)
        for printed in inline()
        for key in named.findall(printed.text)
        if not key.endswith((".py", ".yaml", ".md", ".json")) and not of_schema(key)
        and not (ROOT / "orchestrator" / key.replace(".", "/")).with_suffix(".py").exists()
        and not hasattr(current_run, key.removeprefix("run."))  # as programs.md calls it
    ]  # fmt: skip
    assert not wrong


SETTING = re.compile(r"[+~]?([a-z_]+(?:\.[A-Z_a-z]+)*)=(\S*)")


def settings():
    """(printed, key, value) of all that is written as key=value in mid-sentence."""
    for printed in inline():
        words = printed.text.split()
        found = [SETTING.fullmatch(word) for word in words]
        if all(found) and not {*words} & {*NOT_OURS, *MISSPELLED}:
            for key, value in (one.groups() for one in found):
                yield printed, key, value


def test_every_value_of_a_setting_is_one_that_it_takes():
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    seen = 0
    for printed, key, value in settings():
        for one in value.split("|"):
            if not one or one == "…" or one.isupper() or one in ("G", "m"):
                continue
            if key in groups:
                assert (ROOT / "conf" / key / f"{one}.yaml").exists(), printed
            elif "." in key and not key.startswith(("job.", "optimizer.")):
                nested = OmegaConf.from_dotlist([])
                OmegaConf.update(nested, key, yaml.safe_load(one))
                OmegaConf.merge(OmegaConf.structured(Config), nested)  # its type
            seen += 1
    assert seen > 40


# ------------------------------------------------------------------ code, files, links


OURS = ("orchestrator", "jobs", "slurm")
ENTRY_POINTS = {seam.group for seam in PLUGIN_KINDS}


def test_every_block_of_python_compiles_and_what_it_imports_of_ours_is_there():
    found = python_blocks()
    assert len(found) > 10
    for printed in found:
        tree = ast.parse(printed.text, filename=printed.page)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(OURS):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), printed


def test_every_dotted_name_of_ours_is_there():
    ours = re.compile(rf"(?<![\w./])(?:{'|'.join(OURS)})(?:\.[A-Za-z_]+)+")
    for printed in inline():
        for dotted in ours.findall(printed.text):
            if dotted.endswith((".py", ".yaml", ".sbatch", ".conf", ".launch")):
                continue
            if dotted in ENTRY_POINTS:
                continue
            module, names = dotted, []
            while not _is_module(module):
                module, _, name = module.rpartition(".")
                names.insert(0, name)
            value = importlib.import_module(module)
            for name in names:
                value = getattr(value, name)


def _is_module(dotted):
    try:
        return importlib.util.find_spec(dotted) is not None
    except ModuleNotFoundError:
        return False


def test_every_file_that_is_named_exists():
    path = re.compile(r"[\w./~<*>-]+/[\w.*<>-]*|\w+\.py")
    missing = []
    for printed in inline():
        name = printed.text
        if not path.fullmatch(name) or name.startswith(tuple(ELSEWHERE)):
            continue
        bases = (ROOT, ROOT / "orchestrator", (ROOT / printed.page).parent, ROOT / "benchmarks")
        there = any(list(base.glob(name.strip("/"))) for base in bases)
        alone = "/" not in name.strip("/")  # in a table of rooms, beside the one it lies in
        if not there and not (alone and any((ROOT / "orchestrator").rglob(name.strip("/")))):
            missing.append(str(printed))
    assert not missing


def test_every_link_within_the_project_leads_somewhere():
    for page, target in links():
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page}: {target}"
