"""The batch script as a value: what each request writes into it. Nothing is started."""

import pytest

from orchestrator.clusters.slurm.batch_script import STARTER, Here, batch_script
from orchestrator.rundir.folder import RunDir
from tests.clusters.slurm.test_batch_script import slurm_config


def text_of(tmp_path, **cluster):
    here = Here(
        python="/usr/bin/python3", folder=tmp_path / "here", package=tmp_path / "code/orchestrator",
        path=(tmp_path / "code", tmp_path / "here/lib"),
    )  # fmt: skip
    return batch_script(slurm_config(**cluster), RunDir(tmp_path / "run"), 2, here)


def test_a_flag_without_a_value_is_written_without_one_and_a_false_one_not_at_all(tmp_path):
    flags = {"exact": True, "label": False, "cpu-bind": "cores"}
    text = text_of(tmp_path, srun_flags=flags, slurm_flags={"spread-job": True, "hold": False})
    lines = [line.strip(" \\") for line in text.splitlines()]
    assert {"--exact", "--cpu-bind=cores", "#SBATCH --spread-job"} <= set(lines)
    assert not any("label" in line or "hold" in line for line in lines)


def test_a_preamble_ends_at_a_word_that_it_does_not_hold(tmp_path):
    preamble = ["END_OF_PREAMBLE", "module load x", "END_OF_PREAMBLE_"]
    lines = text_of(tmp_path, preamble=preamble).splitlines()
    begins = lines.index(". /dev/fd/8 8<<'END_OF_PREAMBLE__'  # cluster.preamble")
    assert lines[begins + 1 : begins + 5] == [*preamble, "END_OF_PREAMBLE__"]


def test_a_container_sees_the_run_the_code_and_where_the_person_stands(tmp_path):
    folders = [tmp_path / name for name in ("code", "here", "run")]
    python = f"python3 -u {tmp_path / 'code/orchestrator' / STARTER}"
    image = {"container": "/images/a.sqsh"}
    pyxis = text_of(tmp_path, **image, container_runtime="pyxis")
    mounts = ",".join(f"{folder}:{folder}" for folder in folders)
    for words in ("--container-image=/images/a.sqsh", f"--container-mounts={mounts}",
                  f"--container-workdir={folders[1]}", python):  # fmt: skip
        assert f"    {words} \\" in pyxis.splitlines()
    plain = text_of(tmp_path, **image, container_runtime="apptainer")
    binds = "--bind=" + ",".join(map(str, folders))
    assert f"    apptainer exec {binds} /images/a.sqsh {python} \\" in plain.splitlines()
    gpus = text_of(tmp_path, **image, container_runtime="apptainer", gpus_per_node=2)
    with_gpus = f"    apptainer exec --nv {binds} /images/a.sqsh {python} \\"
    assert with_gpus in gpus.splitlines()
    bare = text_of(tmp_path)
    assert f"    /usr/bin/{python} \\" in bare.splitlines()
    assert "there is no Python at" in bare
    assert "there is no Python at" not in pyxis


@pytest.mark.parametrize(
    ("asked", "written"), [(False, "no-requeue"), (True, "requeue"), (None, "requeue")]
)
def test_a_job_is_requeued_unless_that_was_forbidden(tmp_path, asked, written):
    lines = text_of(tmp_path, requeue=asked).splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert [line for line in options if line.endswith("requeue")] == [f"#SBATCH --{written}"]
