"""The two commands of docs/explanation/reproducible.md, made shorter, end with one digest."""

import re

from tests import helpers
from tests.docs.scripts import ROOT


def _commands():
    page = (ROOT / "docs" / "explanation" / "reproducible.md").read_text(encoding="utf-8")
    block = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1].replace("\\\n", " ")
    return [line.split()[3:] for line in block.splitlines() if line.strip()]


def test_the_commands_of_the_page_end_with_one_digest(tmp_path):
    digests = set()
    for number, arguments in enumerate(_commands()):
        shorter = ("job.layers=[784,32,10]", "train.updates=3")
        folder = tmp_path / str(number)
        done = helpers.call(*arguments, *shorter, f"run.dir={folder}", "-q")
        assert done.returncode == 0, done.stdout + done.stderr
        digests.add(helpers.result(folder)["weights_sha256"])
    assert len(digests) == 1
