"""The batch script as a value: as tests/golden has it where known, inert where hostile."""

import copy
import functools
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.clusters.slurm.batch_script import SubmitHost, batch_script
from orchestrator.clusters.slurm.safe_values import PATTERNS, Default, check_defaults, check_values
from orchestrator.config.composer import compose
from orchestrator.config.schema import Config, gpu_count
from orchestrator.errors import ConfigError
from orchestrator.rundir.folder import RunDir

GOLDEN = Path(__file__).parents[2] / "golden"
RUN = Path("/shared/runs/one")
HERE = SubmitHost(
    python="/shared/venv/bin/python",
    folder=Path("/shared/project"),
    package=RUN / "code/000/0/orchestrator",
    path=(RUN / "code/000/0", Path("/shared/project")),
    code=RUN / "code/000",
)
GOLDEN_REQUESTS = {
    "dev": ["+cluster=slurm_dev"],
    "one_node_8_gpus": [
        "+cluster=slurm", "cluster.nodes=1", "cluster.ranks_per_node=8", "cluster.gpus_per_node=8",
        "cluster.cpus_per_rank=12", "cluster.memory_gib=480", "cluster.exclusive=true",
        "cluster.partition=gpu", "cluster.account=vision", "cluster.time_min=1440",
        "+cluster.container=/images/torch.sif", "+cluster.container_runtime=apptainer",
    ],
    "30_nodes_8_gpus_nccl": [
        "+cluster=slurm", "experiment=jepa_240", "cluster.nodes=30", "cluster.ranks_per_node=8",
        "cluster.gpus_per_node=8", "cluster.cpus_per_rank=12", "cluster.partition=gpu",
        "cluster.qos=long", "cluster.constraint='a100&ib'", "cluster.exclude='gpu[17,23-25]'",
        "+cluster.slurm_flags.reservation=team",
        "+cluster.slurm_flags.comment='predictive pretraining, part 2'",
        "cluster.signal_ahead_s=300", "cluster.time_min=2880", "transport=nccl", "run.name=jepa",
        "+cluster.slurm_flags.mail-type=FAIL", "+cluster.slurm_flags.switches=1",
        "cluster.preamble=[module load cuda/12.4]", "+cluster.environment.NCCL_SOCKET_IFNAME=ib0",
    ],
    "ascend_hccl": ["+cluster=slurm_ascend", "cluster.partition=npu"],
}  # fmt: skip


def script_of(config: Config, run: Path = RUN, *defaults: Default) -> str:
    check_values(config, run)
    check_defaults(defaults)
    return batch_script(config, RunDir(run), 0, replace(HERE, defaults=defaults))


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_a_known_request_makes_the_golden_script_which_bash_can_read(name):
    golden = GOLDEN / f"{name}.sbatch"
    assert script_of(compose(GOLDEN_REQUESTS[name])) == golden.read_text()
    subprocess.run(["bash", "-n", golden], check=True)


def slurm_config() -> Config:
    return compose(["+cluster=slurm"])


BENIGN = slurm_config()
TEXTS = [*(f"cluster.{name}" for name in PATTERNS), "run.name",
         "cluster.slurm_flags.mail-user", "cluster.environment.A", "cluster.slurm_conf",
         "run.dir", "cluster.slurm_flags.*", "cluster.environment.*",
         "cluster.srun_flags.mem-bind", "cluster.srun_flags.*", "cluster.gpus_per_node",
         "SBATCH_PARTITION",
         ]  # fmt: skip
PIECES = ["\n", "\r", "\0", "\x1b", "\u2028", "$(touch pwned)", "`touch pwned`", "'", '"', "\\",
          ";", "&&", "|", ">", "--wrap=id", "-", " ", "#", "#SBATCH --uid=0", "$HOME", "${IFS}",
          "%j", "a", "gpu", "/", "=", ",", ":", "(", ")", "!", "*", "~", "é"]  # fmt: skip
HOSTILE = st.one_of(
    st.text(min_size=1, max_size=12),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join),
)


def with_value(key: str, value: str) -> tuple[Config, Path] | tuple[Config, Path, Default]:
    config, run = copy.deepcopy(BENIGN), RUN
    if key == "SBATCH_PARTITION":
        return config, run, Default(variable=key, option="partition", value=value)
    if key == "run.dir":
        return config, Path("/shared/" + value)
    section, name, *entry = key.split(".")
    if entry:
        table = getattr(getattr(config, section), name)
        table.update({value: "x"} if entry == ["*"] else {entry[0]: value})
    else:
        setattr(getattr(config, section), name, value)
    if key == "cluster.container":
        config.cluster.container_runtime = "pyxis"
    return config, run


@functools.cache
def harmless(key: str) -> list[str]:
    """The script with a value that nobody would fear."""
    script = script_of(*with_value(key, "4" if "gpus" in key else "x"))
    return [line.removesuffix(" \\") for line in script.splitlines()]


@pytest.mark.parametrize("key", TEXTS)
@settings(max_examples=60)
@given(value=HOSTILE)
def test_a_hostile_value_is_refused_or_inert(key, value):
    try:
        script = script_of(*with_value(key, value))
    except ConfigError:
        return
    if key == "cluster.gpus_per_node" and not gpu_count(value):
        return  # none are asked for, so nothing is written
    expected = harmless(key)
    lines = [line.removesuffix(" \\") for line in script.splitlines()]
    # As many lines as with a harmless value, each with as many words: it stayed one word.
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert line.startswith("#SBATCH") == other.startswith("#SBATCH")
        if line.startswith(("#SBATCH", "export", "run=", "    --")):
            assert len(shlex.split(line, comments=False)) == len(shlex.split(other))
            for word in re.findall(r"[$`\\]", line.replace("_PID=$$", "")):
                assert key.startswith("cluster.environment"), word


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cluster.partition", "gpu\n#SBATCH --uid=0"),
        ("cluster.slurm_flags.comment", "a$(reboot)"),
        ("cluster.slurm_flags.comment", "--wrap=id"),
        ("cluster.account", "me;id"),
        ("run.name", 'x" --wrap="id'),
        ("cluster.slurm_flags.wrap", "id"),
        ("cluster.srun_flags.mpi", "$(id)"),
        ("cluster.gpus_per_node", "a100:4;id"),
        ("cluster.environment.SLURM_JOB_ID", "7"),
        ("cluster.slurm_flags.mail-user", "`id`"),
        ("cluster.container", "image --privileged"),
        ("run.dir", "a%j"),
        ("run.dir", "a'b"),
    ],
)
def test_an_injection_is_refused_with_the_keys_name(key, value):
    with pytest.raises(ConfigError, match=re.escape(key)):
        script_of(*with_value(key, value))


def test_what_a_person_may_well_mean_is_taken():
    config = copy.deepcopy(BENIGN)
    config.cluster.slurm_flags = {"comment": "Größe 2, second try (a & b)"}
    config.cluster.constraint = "[rack1|rack2]&gpu"
    config.cluster.environment = {"GREETING": 'it\'s $HOME `x` "y"'}
    script = script_of(config, Path("/shared/my runs/über"))
    done = subprocess.run(
        ["bash", "-c", "\n".join(x for x in script.splitlines() if x.startswith("export G"))
         + '\nprintf %s "$GREETING"'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == 'it\'s $HOME `x` "y"'
    assert "--comment='Größe 2, second try (a & b)'" in script
