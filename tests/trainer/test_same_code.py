"""A newcomer's modules are compared with those that the others imported."""

import importlib
import sys

from orchestrator.trainer.survival import changed_modules, modules_of


def test_a_file_of_the_jobs_own_that_changed_on_disk_is_named(tmp_path, monkeypatch):
    (tmp_path / "its_net.py").write_text("WIDTH = 4\n")
    (tmp_path / "its_job.py").write_text("import its_net, json\nclass Own: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = importlib.import_module("its_job").Own()
    then = modules_of(job)
    assert {"its_job", "its_net"} <= then.keys()
    assert not {"json", "pytest", "orchestrator"} & then.keys()
    assert changed_modules(then, modules_of(job)) == []
    (tmp_path / "its_net.py").write_text("WIDTH = 5\n")
    assert changed_modules(then, modules_of(job)) == ["its_net"]
    for name in ("its_job", "its_net"):
        del sys.modules[name]
