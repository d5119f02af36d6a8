"""Precedence of configuration files and values, and refusals of what would be ignored."""

from pathlib import Path

import pytest

from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer, compose
from orchestrator.errors import ConfigError
from orchestrator.launch import run_app
from orchestrator.runs.start import prepare
from orchestrator.sweep.points import check_points
from tests.refusals import refused

pytestmark = pytest.mark.hydra

TINY = "job._target_=tests.tiny_job.Tiny"
SHARDED = ["engine.shard_optimizer=true"]


def folder(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / (name.replace("__", "/") + ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


def points(*line):
    composer = Composer(read_command_line(line))
    assert composer.compose().sweeps
    return check_points(composer)


def test_a_job_file_of_ones_own_wins_over_the_shipped_one_of_its_name(tmp_path):
    conf = folder(tmp_path, job__line="_target_: tests.tiny_job.Tiny\nwidth: 3\n")
    own = {"_target_": "tests.tiny_job.Tiny", "width": 3}
    assert compose(["job=line"], conf).job == own
    assert [p.config.job for p in points("-m", "job=line", "train.updates=1,2", "-cd", conf)] == [
        own,
        own,
    ]


def test_a_folder_on_hydras_search_path_wins_too(tmp_path):
    conf = folder(
        tmp_path,
        other__job__line="_target_: tests.tiny_job.Tiny\n",
        main__mine=f"defaults: [base, _self_]\nhydra: {{searchpath: ['{tmp_path}/other']}}\n",
    )
    assert compose(["job=line"], f"{conf}/main", "mine").job == {"_target_": "tests.tiny_job.Tiny"}


@pytest.mark.parametrize("name", ["mine", "config"])
def test_a_primary_of_ones_own_is_taken_by_its_name(tmp_path, name):
    text = "defaults: [base, _self_]\njob: {_target_: my.Job, width: 3}\ntrain: {epochs: 7}\n"
    conf = folder(tmp_path, **{name: text})
    found = compose(["train.seed=4"], conf, name)
    assert (found.job, found.train.epochs) == ({"_target_": "my.Job", "width": 3}, 7)
    assert found.facts.parameters is None, "digits' are not meant for it"


OWN = "defaults: [base, _self_]\n"
WRONG_FILES = [  # the files, what is chosen, and the names in the message
    (
        {"mine": OWN, "cluster__site": "partion: gpu\n"},
        ["cluster=site"],
        "cluster/site.yaml partion partition",
    ),
    (
        {"mine": OWN, "cluster__site": "defaults: [slurm]\nranks_per_node: many\n"},
        ["cluster=site"],
        "cluster/site.yaml ranks_per_node many",
    ),
    (
        {"mine": OWN, "experiment__more": "train: {updates: 3}\n"},
        ["experiment=more"],
        "experiment/more.yaml @package _global_",
    ),
    (
        {"mine": OWN + "train: {updats: 3}\n"},
        [],
        "mine.yaml train.updats updates",
    ),
    (
        {"mine": OWN + "hydra: {run: {dir: outputs}}\n"},
        [],
        "hydra.run.dir=outputs run.dir",
    ),
    ({"mine": "a: {\n"}, [], "mine.yaml line 2"),
    ({"mine": "job: {_target_: *nobody}\n"}, [], "mine.yaml line 1 alias"),
    ({"mine": "defaults: [base, mine, _self_]\n"}, [], "defaults mine.yaml itself"),
    (
        {"mine": "defaults: [base, more, _self_]\n", "more": "defaults: [mine]\n"},
        [],
        "defaults mine.yaml more.yaml",
    ),
    (
        {
            "mine": "defaults: [base, override cluster: slurm, _self_]\n",
            "cluster__slurm": "defaults: [slurm]\n",
        },
        [],
        "defaults cluster/slurm.yaml itself",
    ),
    *(
        ({"mine": "train: {updates: 3}\n"}, chosen, "mine.yaml base _self_")
        for chosen in ([], ["job=digits"], ["cluster.nodes=3"])
    ),
    ({"mine": OWN, "base": "model: x\n"}, [], "base.yaml base"),
]


@pytest.mark.parametrize(("files", "chosen", "names"), WRONG_FILES)
def test_unusable_file_is_refused(tmp_path, files, chosen, names):
    with refused(ConfigError, names):
        compose(chosen, folder(tmp_path, **files), "mine")


def test_a_primary_that_lists_a_cluster_takes_both_spellings(tmp_path):
    conf = folder(tmp_path, mine="defaults: [base, override cluster: local, _self_]\n")
    for spelling in ("cluster=slurm", "+cluster=slurm"):
        assert compose([spelling], conf, "mine").cluster.kind == "slurm"


def test_a_default_that_was_chosen_by_name_is_kept(tmp_path):
    assert compose(["job=digits", "job._target_=my.Digits"]).job["layers"][0] == 784
    text = "# @package _global_\ndefaults: [override /job: digits]\njob: {_target_: my.Digits}\n"
    conf = folder(tmp_path, experiment__theirs=text)
    assert compose(["experiment=theirs"], conf).train.epochs == 20


def test_another_optimizer_inherits_no_argument_of_the_default_one():
    stated = ["optimizer._target_=torch.optim.RMSprop", "optimizer.alpha=0.9"]
    assert compose(stated).optimizer == {"_target_": "torch.optim.RMSprop", "alpha": 0.9}
    assert compose(["optimizer.name=sgd"]).optimizer == {"name": "sgd"}


def test_a_job_that_builds_its_optimizer_is_given_no_other(tmp_path):
    assert compose(["job=jepa"]).optimizer == {}, "as config.yaml then says"
    prepare(compose(["job=jepa"]))
    conf = folder(tmp_path, experiment__theirs="# @package _global_\noptimizer: {eps: 1e-8}\n")
    for stated in (["optimizer=adam"], ["optimizer.weight_decay=0.0"], ["experiment=theirs"]):
        with refused(ConfigError, "optimizer optimizer=null"):
            prepare(compose(["job=jepa", *stated], conf))
    with refused(ConfigError, "optimizer=adam"):
        prepare(compose(["optimizer=null"]))


def test_a_schedule_beside_a_jobs_own_rates_is_refused():
    with refused(ConfigError, "tests.tiny_job.OwnRate.learning_rate schedule.decay=cosine"):
        prepare(compose(["job._target_=tests.tiny_job.OwnRate", "schedule.decay=cosine"]))


def test_the_users_home_is_meant_by_a_tilde_where_no_shell_reads_it():
    found = compose(
        [
            "job.data_dir=~/mnist",
            "+job.more=[~/a,{b: ~/c}]",
            "cluster=slurm",
            "cluster.container=~/x.sif",
            "cluster.environment={A: ~/a, B: b}",
            "cluster.preamble=['cd ~/x']",
        ]
    )
    home, cluster = str(Path.home()), found.cluster
    assert found.job["data_dir"] == f"{home}/mnist"
    assert found.job["more"] == [f"{home}/a", {"b": f"{home}/c"}]
    assert (cluster.container, cluster.preamble) == (f"{home}/x.sif", ["cd ~/x"])
    assert cluster.environment == {"A": f"{home}/a", "B": "b"}


def test_an_experiments_own_sweep_honours_run_dir_and_all_points_are_checked(tmp_path):
    line = ("experiment=time_and_memory", f"run.dir={tmp_path / 'mine'}")
    assert [p.config.run.dir for p in points(*line)] == [str(tmp_path / "mine" / n) for n in "012"]
    here = Path.cwd()
    for line, folders in (
        (["run.dir=a,b", "hydra.sweep.dir=c"], [here / "a", here / "b"]),
        (["run.dir=a/b/../c", "train.seed=1,2"], [here / "a" / "c" / "0", here / "a" / "c" / "1"]),
        (["run.dir=~/s", "train.seed=1"], [Path.home() / "s" / "0"]),
        (["run.dir='~/s${train.seed}'", "train.seed=1"], [Path.home() / "s1"]),
        (["hydra.sweep.dir=~/s", "train.seed=1"], [Path.home() / "s" / "0"]),
    ):
        assert [p.folder for p in points("-m", *line)] == folders, line
    folders = (f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=x${hydra:job.num}")
    named = points("-m", "train.seed=1,2", *folders)
    assert [p.config.run.dir for p in named] == [str(tmp_path / "x0"), str(tmp_path / "x1")]


def test_a_sweeps_folder_is_that_of_its_keys_and_of_what_is_fixed():
    def name_of(*line):
        composer = Composer(read_command_line(["-m", *line]))
        return composer.loader.sweep_name(composer.overrides, composer.line)

    composer = Composer(read_command_line(["-m", "train.seed=1,2,3"]))
    folder, name = composer.compose().point_folder, name_of("train.seed=1,2,3")
    assert folder.name == name
    assert [p.own_folder for p in check_points(composer)] == [folder / n for n in "012"]
    assert name_of("train.seed=4,5", "run.watch=true", "sweep.force=true") == name
    assert name_of("train.seed=1,2", "train.updates=3") != name
    assert name_of("job.width=1,2") != name


def test_sweep_with_wrong_points_starts_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(ConfigError, "accumulation.steps 1 4-7 train.seed 0"):
        run_app(["-m", TINY, "train.seed=1,-1", "job.width=3,4", "accumulation.steps=2,0"])
    assert not list(tmp_path.iterdir())
    with refused(ConfigError, "all points Tinny Tiny"):
        run_app(["-m", f"{TINY[:-4]}Tinny", "train.seed=1,2"])


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (["hydra/launcher=joblib"], "hydra/launcher"),
        (["sweep.force=true"], "sweep.force=true -m"),
        (["--force"], "--force sweep.force"),
        (
            ["-m", "hydra.sweeper.params.train.seed=1", "train.seed=1,2"],
            "hydra.sweeper.params.train.seed",
        ),
        (["-m", "experiment=theirs", "train.seed=1,2"], "sweep.search=tpe"),
        (["-m", "train.seed=range(0)"], "train.seed"),
        (["-m", "train.seed=range(0,9,0)"], "train.seed=range(0,9,0) step"),
        (["-m", "train.seed=choice(1,2),3"], "choice() train.seed=1,2,3"),
        (["train.seed=[range(0,9)]"], "train.seed=[range(0,9)] train.seed=1,2,3"),
        (["-m", "train.seed=1,2", "hydra.sweep.dir=a,b"], "hydra.sweep.dir=a,b hydra"),
        (["--config-path=conf"], "--config-path --config-dir"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun resume"),
        (["--cgf", "job"], "--cgf --cfg"),
        (["--nproc_per_node=2"], "--nproc_per_node cluster.ranks_per_node=2"),
        (["--nproc-per-node", "2"], "--nproc-per-node cluster.ranks_per_node=2"),
        (["train.max_epochs=3"], "train.max_epochs train.epochs"),
        (
            ["accumulation.per_device_train_batch_size=3"],
            "accumulation.per_device_train_batch_size accumulation.micro_batch",
        ),
        (["train.precision=bf16-mixed"], "train.precision bfloat16"),
        (["train.precision=16-mixed"], "train.precision float16"),
        (["-m", "train.seed=1,2", "--cfg", "job"], "--cfg -m"),
        (["train.seed=1,2"], "train.seed=1,2 -m"),
        (["schedule.base_lr=interval(0.1,1)"], "schedule.base_lr -m"),
        (["-m", "schedule.base_lr=interval(0.1,1)"], "sweep.search=tpe"),
        (["+clutser=slurm"], "clutser cluster"),
        (["-m", "train.seed=1,1"], "all points equal"),
        (
            [*SHARDED, "accumulation.reduction=reproducible", "accumulation.micro_batch=8"],
            "engine.shard_optimizer=true accumulation.reduction=fast",
        ),
        (
            [*SHARDED, "~optimizer", "+optimizer._target_=torch.optim.Adagrad"],
            "engine.shard_optimizer=true SGD Adam",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, line, names):
    theirs = "# @package _global_\nhydra: {sweeper: {_target_: os.system}}\n"
    conf = folder(tmp_path, experiment__theirs=theirs)
    with refused(ConfigError, names):
        run_app([*line, "--config-dir", conf])


def test_a_setting_is_named_as_it_was_typed():
    with refused(ConfigError, "job.lr=0.01,0.1 -m") as caught:
        run_app(["job=digits", "job.lr=0.01,0.1"])
    assert str(caught.value).startswith("job.lr=")


def test_a_value_may_refer_to_a_swept_one_that_nothing_else_sets():
    found = points("-m", TINY, "job.width=3,4", "train.updates=${job.width}")
    assert [p.config.train.updates for p in found] == [3, 4]


@pytest.mark.parametrize("named", ["", "nowhere"])
def test_a_folder_of_configurations_has_to_exist(named):
    with refused(ConfigError, f"--config-dir '{named}'"):
        Composer(read_command_line([f"--config-dir={named}"]))


def test_help_is_printed_whatever_else_is_typed(capsys):
    for typed in (["-m", "accumulation.steps=1,2"], ["job=nope"], ["accumulation.stpes=1"]):
        assert run_app([*typed, "--help"]) == 0
        assert "optimizer: adam, adamw" in capsys.readouterr().out


def test_what_is_typed_wins_over_the_sweep_of_a_file(tmp_path):
    text = "defaults: [base, _self_]\nhydra: {sweeper: {params: {train.seed: '1,2'}}}\n"
    line = ("-m", TINY, "train.seed=3,4", "-cd", folder(tmp_path, mine=text), "-cn", "mine")
    assert [p.config.train.seed for p in points(*line)] == [3, 4]
    assert [p.config.train.seed for p in points(*line, "train.seed=5")] == [5], "the last"
