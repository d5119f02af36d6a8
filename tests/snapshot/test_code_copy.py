"""The copy of the code: no secrets, nothing from outside the folder, and a bounded size."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import snapshot
from orchestrator.config.program import ProgramConfig
from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir
from orchestrator.snapshot import CODE_VARIABLE, submitted
from orchestrator.source.git import code_state
from orchestrator.source.modules import PACKAGE

SECRETS = (
    ".env",
    ".env.local",
    "conf/prod.env",
    "id_rsa",
    "keys/id_ed25519",
    ".aws/credentials",
    ".ssh/config",
    "server.pem",
    "KEY.PEM",
    ".netrc",
    "credentials.json",
    "token",
    ".npmrc",
)
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
    copy = run.snapshot(0)
    left_out = snapshot.copy_code("mine.Mine", run.path, copy)
    found = {
        str(path.relative_to(copy / "0")): path
        for path in (copy / "0").rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    text = b"".join(path.read_bytes() for path in found.values() if path.is_file())
    return found, text, left_out, (copy / "copy.json").read_text()


def test_a_copy_has_the_time_of_the_submission(project, tmp_path):
    for name in CODE:
        os.utime(project / name, (1.0, 1.0), follow_symlinks=False)
    found, *_ = taken(tmp_path)
    submitted = (tmp_path / "run").stat().st_ctime - 60
    assert found
    assert all(path.lstat().st_mtime > submitted for path in found.values())


def test_files_that_hold_secrets_by_name_are_neither_copied_nor_in_the_diff(project, tmp_path):
    found, text, left_out, record = taken(tmp_path)
    assert set(found) == set(CODE)
    assert set(left_out) == set(SECRETS)
    assert b"hunter2" not in text
    assert "hunter2" not in record
    assert "changed code" in record
    assert "hunter2" not in code_state(project / "package")["diff"]


def test_python_files_that_no_commit_holds_are_named_and_kept(project):
    (project / "package" / "new.py").write_text("class New: ...\n")
    (project / "package" / ".gitignore").write_text("ignored.py\n")
    (project / "package" / "ignored.py").write_text("width = 3\n")
    state = code_state(project / "package")
    assert state["untracked"] == ["ignored.py", "new.py"]
    assert "+class New: ..." in state["diff"]
    assert "+width = 3" in state["diff"]


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


def test_a_folder_of_runs_is_left_out_and_a_package_of_that_name_is_not(project, tmp_path):
    (project / "runs").mkdir()
    (project / "runs" / "mine.py").write_text("code\n")
    for name, copied in (("before", False), ("after", True)):
        (tmp_path / name).mkdir()
        assert ("runs/mine.py" in taken(tmp_path / name)[0]) is copied
        (project / "runs" / "__init__.py").write_text("")


def test_links_stay_links_and_those_that_lead_out_are_left_out(project, tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("hunter2")
    (project / "out.py").symlink_to(outside)
    (project / "up").symlink_to("..")
    (project / "absolute").symlink_to(project / "mine.py")
    (project / "alias.py").symlink_to("mine.py")
    found, text, left_out, _ = taken(tmp_path)
    assert found["alias.py"].readlink() == Path("mine.py")
    assert {"out.py", "up", "absolute"} <= set(left_out)
    assert not {"out.py", "up", "absolute"} & set(found)
    assert b"hunter2" not in text


def test_a_link_to_a_folder_is_copied_without_git_too(project, tmp_path, monkeypatch):
    shutil.rmtree(project / ".git")
    (project / "package" / "inner").symlink_to("../conf")
    monkeypatch.setattr(snapshot, "source_roots", lambda _: {project: {"package", "conf"}})
    snapshot.copy_code("package.Mine", tmp_path / "run", tmp_path / "copy")
    inner = tmp_path / "copy" / "0" / "package" / "inner"
    assert inner.is_symlink()
    assert (inner / "environment.yaml").exists()


GENERATED = ("generated/__init__.py", "generated/by_computed_name.py", "generated/table.json")


@pytest.fixture
def imports(project, tmp_path, monkeypatch):
    """A job of the project that imports ignored files, and others by links out of it."""
    (project / "mine.py").write_text(
        "import _version, linked.part, alone, inner.credentials, token, generated\n"
        "class Mine: ...\n"
    )
    (project / ".gitignore").write_text("_version.py\n*.so\nunused.py\ngenerated/\n")
    (project / "generated").mkdir()
    for name in ("_version.py", "unused.py", "token.py", *GENERATED, "generated/.env"):
        (project / name).write_text("code\n")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("__init__.py", "part.py", "data.bin", "alone.py"):
        (outside / name).write_text(f"{name} of the library\n")
    (project / "linked").symlink_to("../outside")
    (project / "alone.py").symlink_to("../outside/alone.py")
    (project / "inner").symlink_to("package")
    monkeypatch.syspath_prepend(project)
    return project


def test_ignored_and_linked_files_are_copied_if_the_job_imports_them(imports, tmp_path):
    """Ranks would fail after the queue, or import what has been edited since."""
    found, _, left_out, _ = taken(tmp_path)
    linked = {"linked/__init__.py", "linked/part.py", "linked/data.bin", "linked/alone.py"}
    copied = {"_version.py", "alone.py", *linked, *GENERATED}
    assert copied <= set(found), "a part of a package would hide the rest of it"
    assert not {"unused.py", "generated/.env"} & set(found)
    assert "generated/.env" in left_out
    assert not any(found[name].is_symlink() for name in copied)
    assert found["linked/part.py"].read_text() == "part.py of the library\n"
    assert not {"alone.py", "linked"} & set(left_out)
    assert found["inner"].readlink() == Path("package")


class FailingPath:
    """A file or folder for which calls of `os` fail: denied at first."""

    def __init__(self, folder, name, monkeypatch):
        self.path, self.name, self.error = str(folder / name), name, errno.EACCES
        self.monkeypatch, may = monkeypatch, os.access
        monkeypatch.setattr(
            os, "access", lambda path, mode: str(path) != self.path and may(path, mode)
        )

    def fail(self, call, always=None):
        """Let this call of `os` fail, with the error `always` if one is given."""
        really = getattr(os, call)

        def fail(path, *flags, **more):
            if str(path) == self.path:
                error = always or self.error
                raise OSError(error, os.strerror(error), self.path)
            return really(path, *flags, **more)

        self.monkeypatch.setattr(os, call, fail)

    def expect_left_out_until_an_outage(self, tmp_path):
        """Copy the code: what is denied is left out, an outage raises the system's error."""
        found, _, left_out, _ = taken(tmp_path)
        assert self.name in left_out
        assert "generated/__init__.py" in found
        for error in (errno.ESTALE, errno.EIO):
            self.error = error
            with pytest.raises(OSError, match=os.strerror(error)):
                taken(tmp_path / str(error))


@pytest.mark.parametrize("call", ["stat", "open"])
def test_a_file_that_is_denied_is_left_out_and_an_outage_ends_the_start(
    imports, tmp_path, monkeypatch, call
):
    file = FailingPath(imports, "generated/by_computed_name.py", monkeypatch)
    file.fail(call)
    file.expect_left_out_until_an_outage(tmp_path)


def test_folder_with_tracked_files_is_copied_whole_if_it_becomes_a_package(imports, tmp_path):
    """Without its `__init__.py` it would hide nothing, and Python finds the package elsewhere."""
    (imports / "generated" / "README").write_text("tracked\n")
    subprocess.run(["git", "add", "-f", "generated/README"], cwd=imports, check=True)
    found, *_ = taken(tmp_path)
    assert {*GENERATED, "generated/README"} <= set(found)


def test_imported_modules_that_are_too_large_are_left_out_unless_the_copy_hides_them(
    imports, tmp_path
):
    """They are imported from where they are, as without a copy."""
    for name in ("_version.py", "generated/weights.bin"):
        (imports / name).touch()
        os.truncate(imports / name, snapshot.LIMIT_BYTES + 1)
    found, _, left_out, _ = taken(tmp_path)
    assert {"_version.py", "generated"} <= set(left_out)
    assert not {"_version.py", *GENERATED} & set(found)
    assert {"linked/part.py", "alone.py"} <= set(found)
    (imports / "package" / "__init__.py").write_text("import package.extension\n")
    (imports / "package" / "extension.so").touch()
    os.truncate(imports / "package" / "extension.so", snapshot.LIMIT_BYTES + 1)
    (imports / ".gitignore").write_text("*.so\ngenerated/\n_version.py\n")
    (imports / "mine.py").write_text("import package.extension\nclass Mine: ...\n")
    with pytest.raises(RunFolderError, match=r"package/extension\.so.* files\); set run\.snapshot"):
        taken(tmp_path / "again")


def test_a_package_that_is_too_large_is_copied_in_part_where_ranks_cannot_reach_it(
    project, tmp_path
):
    """Its own folder is not on their path: the script is the copied one."""
    (project / "train.py").write_text("import generated.part\n")
    (project / ".gitignore").write_text("generated/\n")
    (project / "generated").mkdir()
    (project / "generated" / "part.py").write_text("")
    (project / "generated" / "again").symlink_to(".")  # followed, it would never end
    for name, other in ("ab", "ba"):  # nor would these
        (project / "generated" / name).mkdir()
        (project / "generated" / name / other).symlink_to(f"../{other}")
        (project / "generated" / name / f"{name}.txt").touch()
    large = project / "generated" / "weights.bin"
    large.touch()
    program = ProgramConfig(command=(str(project / "train.py"),))
    names, _ = _copied(program, tmp_path / "small")
    assert "generated/weights.bin" in names
    assert not any("again" in name for name in names)
    assert sum(name.endswith("a.txt") for name in names) == 2
    os.truncate(large, snapshot.LIMIT_BYTES + 1)
    names, left_out = _copied(program, tmp_path / "large")
    assert "generated/part.py" in names
    assert "generated/weights.bin" not in names
    assert "generated" in left_out


def test_runs_in_a_package_keep_no_module_out_of_the_copy(imports, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "LIMIT_FILES", 30)
    run = imports / "generated" / "earlier"
    (run / "attempts").mkdir(parents=True)
    for name in (".lock", *map(str, range(60))):
        (run / name).touch()
    (imports / "generated" / "later").mkdir()
    (imports / "generated" / "later" / "part.py").touch()
    (imports / "mine.py").write_text("import generated.later.part\nclass Mine: ...\n")
    found, _, left_out, _ = taken(tmp_path)
    assert {*GENERATED, "generated/later/part.py"} <= set(found)
    assert not any("earlier" in name for name in (*found, *left_out))


@pytest.mark.parametrize("ignored", ["", "shared/\n"])
def test_no_file_is_copied_through_a_link_that_is_copied(imports, tmp_path, ignored):
    for name in ("part/__init__.py", "part/other.py", "shared/x.py"):
        (imports / name).parent.mkdir(exist_ok=True)
        (imports / name).write_text("code\n")
    (imports / "part" / "common").symlink_to("../shared")
    (imports / ".gitignore").write_text("/part/__init__.py\n" + ignored)
    (imports / "mine.py").write_text("import part\nclass Mine: ...\n")
    found, *_ = taken(tmp_path)
    assert found["part/common"].readlink() == Path("../shared")
    assert {"part/__init__.py", "part/other.py"} <= set(found)
    assert ("shared/x.py" in found) is not bool(ignored)


@pytest.mark.parametrize("alias", ["part/common", "part/common/x.py"])
def test_an_ignored_file_behind_a_link_is_copied_if_the_job_imports_it(imports, tmp_path, alias):
    for name in ("part/__init__.py", "shared/x.py", "shared/.env"):
        (imports / name).parent.mkdir(exist_ok=True)
        (imports / name).write_text("code\n")
    (imports / alias).parent.mkdir(exist_ok=True)
    target = "shared" if alias == "part/common" else "shared/x.py"
    (imports / alias).symlink_to(os.path.relpath(imports / target, (imports / alias).parent))
    (imports / ".gitignore").write_text("shared/\n")
    (imports / "mine.py").write_text("import part.common.x\nclass Mine: ...\n")
    found, *_ = taken(tmp_path)
    assert found[alias].is_symlink()
    assert found[alias].exists(), "ranks could not import it"
    assert found["shared/x.py"].read_text() == "code\n"
    assert "shared/.env" not in found


@pytest.mark.parametrize("with_git", [True, False])
def test_a_folder_that_is_denied_is_left_out_and_an_outage_ends_the_start(
    imports, tmp_path, monkeypatch, with_git
):
    folder = imports / "generated" / "more"
    folder.mkdir()
    (folder / "part.py").write_text("code\n")
    if not with_git:
        shutil.rmtree(imports / ".git")
        monkeypatch.setattr(snapshot, "source_roots", lambda _: {imports: {"mine", "generated"}})
    failing = FailingPath(imports, "generated/more", monkeypatch)
    failing.fail("scandir")
    failing.fail("open", always=errno.EACCES)
    failing.expect_left_out_until_an_outage(tmp_path)


def _copied(target, run):
    left_out = snapshot.copy_code(target, run, run / "code")
    files = (path for path in (run / "code").rglob("*") if path.is_file())
    return {str(path.relative_to(run / "code")).partition("/")[2] for path in files}, left_out


def test_a_folder_that_has_become_a_file_is_copied_as_that(project, tmp_path):
    shutil.rmtree(project / "package")
    (project / "package").write_text("a file\n")
    found, *_ = taken(tmp_path)
    assert "package" in found
    assert "package/credentials.py" not in found


def test_a_file_that_is_too_large_is_refused_before_it_is_read(project, tmp_path):
    (project / "weights.bin").touch()
    os.truncate(project / "weights.bin", 1 << 40)
    with pytest.raises(RunFolderError, match=r"the largest is \S+/weights\.bin"):
        taken(tmp_path)


def test_a_copy_is_private_cannot_be_written_and_replaces_a_refused_starts(project, tmp_path):
    (project / "tool.sh").write_text("#!/bin/sh\n")
    (project / "tool.sh").chmod(0o777)
    snapshot.copy_code("mine.Mine", tmp_path / "run", tmp_path / "run" / "code" / "000")
    shutil.rmtree(tmp_path / "run" / "code" / "000" / "0" / "package")
    (project / "mine.py").write_text("mine = 2\n")
    copy = tmp_path / "run" / "code" / "000"
    snapshot.copy_code("mine.Mine", tmp_path / "run", copy)
    assert [path.name for path in copy.parent.iterdir()] == ["000"]
    assert copy.stat().st_mode & 0o777 == 0o700
    modes = {name: (copy / "0" / name).stat().st_mode & 0o777 for name in (*CODE, "tool.sh")}
    assert modes == {**dict.fromkeys(CODE, 0o400), "tool.sh": 0o500}
    assert (copy / "0" / "mine.py").read_text() == "mine = 2\n"
    record = submitted({CODE_VARIABLE: str(copy)})
    assert record["roots"] == {str(project): str(copy / "0")}
    assert submitted({}) is None


def test_the_runs_code_comes_first_in_the_path_of_what_the_batch_script_starts(tmp_path):
    """Neither the entry's own folder, with its many common names, nor the working folder does."""
    entry = PACKAGE / "clusters" / "slurm" / "node_entry.py"
    copy, user = tmp_path / "copy", tmp_path / "user"
    for folder, says in ((copy, "ours"), (user, "theirs"), (tmp_path, "edited")):
        (folder / "orchestrator").mkdir(parents=True)
        (folder / "orchestrator" / "__init__.py").write_text(
            f"import os, sys\nprint({says!r}, sys.path[0], os.environ['PYTHONPATH'])\nexit()"
        )
    done = subprocess.run(
        [sys.executable, "-u", "-P", entry, "after", "run", "0", "0", ""],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"ORCHESTRATOR_PYTHONPATH": f"{copy}:{tmp_path}", "PYTHONPATH": str(user)},
    )
    assert done.stdout == f"ours {copy} {copy}:{tmp_path}:{user}\n"


@pytest.mark.parametrize(
    "folder", ["home/.local/lib/python3.11/site-packages", "usr/lib/python3/dist-packages"]
)
def test_packages_of_a_user_or_an_environment_module_are_not_copied(tmp_path, monkeypatch, folder):
    package = tmp_path / folder / "theirs"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class Mine: ...")
    monkeypatch.syspath_prepend(package.parent)
    assert package.parent not in snapshot.source_roots("theirs.Mine")
    assert not list(snapshot.python_files("theirs.Mine"))


@pytest.fixture(params=["another account's", "without git", "a worktree alone", "slow", "outage"])
def unread(request, project, tmp_path, monkeypatch):
    """A repository that git does not read; returns what the message says."""
    (project / ".gitignore").write_text("data.bin\n")
    (project / "data.bin").write_text("ignored")
    if request.param == "another account's":
        monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        return f"safe.directory {project}"
    if request.param == "without git":
        monkeypatch.setenv("PATH", str(tmp_path))
        return "there is no git here"
    if request.param == "a worktree alone":
        shutil.rmtree(project / ".git")
        (project / ".git").write_text("gitdir: /elsewhere/.git/worktrees/project\n")
        return "not a git repository: /elsewhere"
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text("#!/bin/sh\nexec sleep 60\n")
    git.chmod(0o755)
    really = shutil.which("git")
    monkeypatch.setenv("PATH", f"{git.parent}:/usr/bin:/bin")
    if request.param == "outage":  # git goes on without the folder
        warning = "warning: could not open directory 'conf/': Stale file handle"
        git.write_text(f'#!/bin/sh\necho "{warning}" >&2\nexec {really} "$@"\n')
        return "could not open directory 'conf/': Stale file handle"
    monkeypatch.setattr("orchestrator.source.git.GIT_S", 0.1)
    return "gave no answer"


def test_unreadable_repository_is_not_copied(unread, project, tmp_path):
    with pytest.raises(RunFolderError, match=r"set run\.snapshot=false") as refused:
        taken(tmp_path)
    assert unread in str(refused.value)
    state = code_state(project)
    assert state["commit"] is None
    assert unread in state["error"]


def test_a_folder_without_a_repository_or_a_commit_is_no_error(tmp_path):
    assert code_state(tmp_path)["error"] is None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert code_state(tmp_path)["error"] is None
