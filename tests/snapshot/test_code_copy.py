"""The copy of the code: no secrets, nothing from outside the folder, and a bounded size."""

import os
import subprocess
import tarfile

import pytest

from orchestrator import snapshot
from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir
from orchestrator.snapshot import code_state

SECRETS = (
    ".env", ".env.local", "conf/prod.env", "id_rsa", "keys/id_ed25519", ".aws/credentials",
    ".ssh/config", "server.pem", "KEY.PEM", ".netrc", "credentials.json", "token", ".npmrc",
)  # fmt: skip
CODE = ("mine.py", "secrets.py", "package/credentials.py", "conf/environment.yaml")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository whose tracked files hold secrets, and untracked ones more of them."""
    root = tmp_path / "project"
    for name in (*CODE, *SECRETS):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("first\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=root, check=True)
    subprocess.run([*git, "add", "-f", *CODE, *SECRETS[::2]], cwd=root, check=True)
    subprocess.run([*git, "commit", "-qm", "x"], cwd=root, check=True)
    for name in (*CODE, *SECRETS):
        (root / name).write_text(f"changed {'code' if name in CODE else 'hunter2'}\n")
    monkeypatch.setattr(snapshot, "source_roots", lambda _: {root: {"mine"}})
    return root


def taken(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create()
    left_out = snapshot.take("mine.Mine", run.path, run.snapshot(0))
    with tarfile.open(snapshot.archive_of(run.snapshot(0))) as archive:
        found = {member.name: member for member in archive.getmembers()}
        text = b"".join(archive.extractfile(m).read() for m in found.values() if m.isreg())
    beside = run.snapshot(0).with_suffix(".json").read_text()
    return {name.partition("/")[2]: m for name, m in found.items()}, text, left_out, beside


def test_files_that_hold_secrets_by_name_are_neither_copied_nor_in_the_diff(project, tmp_path):
    found, text, left_out, beside = taken(tmp_path)
    assert set(found) == set(CODE)
    assert set(left_out) == set(SECRETS)
    assert b"hunter2" not in text
    assert "hunter2" not in beside
    assert "changed code" in beside
    assert "hunter2" not in code_state(project / "package")["diff"]


def test_a_repository_within_the_repository_is_copied_like_any_folder(project, tmp_path):
    inner = project / "library"
    inner.mkdir()
    (inner / "part.py").write_text("code\n")
    (inner / ".env").write_text("hunter2")
    subprocess.run(["git", "init", "-q"], cwd=inner, check=True)
    found, text, left_out, _ = taken(tmp_path)
    assert set(found) == {*CODE, "library/part.py"}
    assert "library/.env" in left_out
    assert b"hunter2" not in text


def test_links_stay_links_and_those_that_lead_out_are_left_out(project, tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("hunter2")
    (project / "out.py").symlink_to(outside)
    (project / "up").symlink_to("..")
    (project / "absolute").symlink_to(project / "mine.py")
    (project / "alias.py").symlink_to("mine.py")
    found, text, left_out, _ = taken(tmp_path)
    assert found["alias.py"].issym()
    assert found["alias.py"].linkname == "mine.py"
    assert {"out.py", "up", "absolute"} <= set(left_out)
    assert not {"out.py", "up", "absolute"} & set(found)
    assert b"hunter2" not in text


def test_a_file_that_is_too_large_is_refused_before_it_is_read(project, tmp_path):
    (project / "weights.bin").touch()
    os.truncate(project / "weights.bin", 1 << 40)
    with pytest.raises(RunFolderError, match=r"the largest is weights\.bin"):
        taken(tmp_path)
