"""Every setting, file and name that the pages print exists, and their Python compiles.

What cannot be held against anything is listed, with the reason. The commands of the pages are
executed or parsed by tests/end_to_end/test_printed_commands.py.
"""

import ast
import importlib
import importlib.util
import re
from dataclasses import fields, is_dataclass

import yaml
from omegaconf import OmegaConf

from orchestrator.client.run import current_run
from orchestrator.config.schema import Config
from orchestrator.plugins import CLUSTERS, FRAMEWORKS, TRACKERS, TRANSPORTS
from orchestrator.report.run_tables import print_closing
from orchestrator.rundir.metrics import History
from tests.docs.printed import (
    ROOT,
    blocks,
    inline,
    links,
    python_blocks,
)
from tests.report.conftest import Screen, record, result

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
    **dict.fromkeys(("my_project/", "conf/main.yaml", "conf/job/spirals.yaml"), "of a new project"),
    **dict.fromkeys(("conf/optimizer/nesterov.yaml", "conf/cluster/site.yaml"), "the same"),
    "tests/test_spirals.py": "the same", "spirals.py": "the same",
    **dict.fromkeys(("RUN/", "attempts/", "checkpoints/", "logs/"), "in a run folder"),
    **dict.fromkeys(("tensorboard/", "mlruns/", "wandb/", "submitit/", "code/"), "in a run folder"),
    "runs/": "made by runs", "SWEEP/": "in a sweep's folder",
    ".aws/": "a secret's usual place", "/": "the machine's", "~": "the account's",
    "build/": "made by `make docs`",
    "<folder>": "in a development cluster's folder", "engine/<framework>": "not yet written",
}  # fmt: skip
"""Beginnings of paths that are no files of the project."""


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
ENTRY_POINTS = {seam.group for seam in (CLUSTERS, FRAMEWORKS, TRACKERS, TRANSPORTS)}


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
