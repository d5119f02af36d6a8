"""The scripts in the documentation, run as a reader would."""

import re

from tests import warm
from tests.docs.printed import ROOT, blocks
from tests.helpers import LIMIT_S, call


def _path(page):
    (found,) = (ROOT / "docs").rglob(page)
    return found


def page_text(page):
    """Return the text of the page `docs/<group>/<page>`."""
    return _path(page).read_text(encoding="utf-8")


def script(page, name):
    """The text of the Python block of `docs/<page>` that begins with `# <name>`."""
    found = [text for _, text in blocks(_path(page)) if text.startswith(f"# {name}\n")]
    assert len(found) == 1, f"docs/{page} has {len(found)} scripts {name}"
    return found[0]


def shell_block(page, words):
    """The indented block of `docs/<page>` that has these words."""
    found = [text for language, text in blocks(_path(page)) if not language and words in text]
    assert len(found) == 1, f"docs/{page} has {len(found)} blocks with {words}"
    return found[0]


def table(text, heading):
    """The rows, as tuples of cells, of the table of a page whose first heading is this."""
    found = re.search(
        rf"^\| {re.escape(heading)} \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    assert found, f"there is no table that begins with '{heading}'"
    return [tuple(line.strip("| ").split(" | ")) for line in found[1].splitlines()]


def torchrun(page, name, processes, folder, changed=("", "")):
    """The lines that the script prints when `processes` ranks run it on this machine.

    `changed`: words of it, and their replacements.
    """
    (folder / name).write_text(script(page, name).replace(*changed), encoding="utf-8")
    line = ("--standalone", f"--nproc-per-node={processes}", name)
    how = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = call(*line, module="torch.distributed.run", cwd=folder, timeout=LIMIT_S, **how, code=0)
    return _numbers(done.stdout)


def ranks(page, name, processes, folder, changed=("", "")):
    """As `torchrun`, with ranks that have torch imported already: a second instead of five."""
    (folder / name).write_text(script(page, name).replace(*changed), encoding="utf-8")
    return _numbers(warm.ranks(name.removesuffix(".py"), processes, folder))


def _numbers(printed):
    return [[float(number) for number in line.split()] for line in printed.splitlines()]
