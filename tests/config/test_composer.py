"""Precedence of configuration files and values, and refusals of what would be ignored."""

import re
from pathlib import Path

import pytest

from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer, compose
from orchestrator.errors import ConfigError
from orchestrator.launch import run_app
from orchestrator.runs.start import prepare
from orchestrator.sweep.points import check_points

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
WRONG_FILES = [  # the files, what is chosen, and the message
    (
        {"mine": OWN, "cluster__site": "partion: gpu\n"},
        ["cluster=site"],
        "cluster/site.yaml: there is no key 'partion'; did you mean 'partition'?",
    ),
    (
        {"mine": OWN, "cluster__site": "defaults: [slurm]\nranks_per_node: many\n"},
        ["cluster=site"],
        "cluster/site.yaml: ranks_per_node must be a whole number, but is 'many'",
    ),
    (
        {"mine": OWN, "experiment__more": "train: {updates: 3}\n"},
        ["experiment=more"],
        "experiment/more.yaml has to begin with the line # @package _global_;",
    ),
    (
        {"mine": OWN + "train: {updats: 3}\n"},
        [],
        "mine.yaml: there is no key 'train.updats'; did you mean 'updates'?",
    ),
    (
        {"mine": OWN + "hydra: {run: {dir: outputs}}\n"},
        [],
        "hydra.run.dir=outputs means nothing here: a run's folder is run.dir",
    ),
    ({"mine": "a: {\n"}, [], "mine.yaml, line 2: "),
    ({"mine": "job: {_target_: *nobody}\n"}, [], "mine.yaml, line 1: found undefined alias"),
    ({"mine": "defaults: [base, mine, _self_]\n"}, [], "defaults of mine.yaml include itself"),
    (
        {"mine": "defaults: [base, more, _self_]\n", "more": "defaults: [mine]\n"},
        [],
        "the defaults of mine.yaml and more.yaml include each other",
    ),
    (
        {
            "mine": "defaults: [base, override cluster: slurm, _self_]\n",
            "cluster__slurm": "defaults: [slurm]\n",
        },
        [],
        "the defaults of cluster/slurm.yaml include itself",
    ),
    *(
        ({"mine": "train: {updates: 3}\n"}, chosen, "'mine.yaml' does not extend base")
        for chosen in ([], ["job=digits"], ["cluster.nodes=3"])
    ),
    ({"mine": OWN, "base": "model: x\n"}, [], "/base.yaml hides the shipped base"),
]


@pytest.mark.parametrize(("files", "chosen", "words"), WRONG_FILES)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(tmp_path, files, chosen, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
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
        with pytest.raises(ConfigError, match=r"builds its own optimizer.*Leave optimizer out"):
            prepare(compose(["job=jepa", *stated], conf))
    with pytest.raises(ConfigError, match="try optimizer=adam"):
        prepare(compose(["optimizer=null"]))


def test_a_schedule_beside_a_jobs_own_rates_is_refused():
    words = r"OwnRate\.learning_rate\(update\) gives the rate of each update"
    with pytest.raises(ConfigError, match=words):
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


def test_a_sweep_with_a_wrong_point_starts_none_and_says_all_that_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        run_app(["-m", TINY, "train.seed=1,-1", "job.width=3,4", "accumulation.steps=2,0"])
    said = str(caught.value)
    assert "points 4-7: train.seed must be at least 0" in said
    assert "accumulation.steps must be at least 1" in said
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"all points: .*has no class 'Tinny'.*'Tiny'"):
        run_app(["-m", f"{TINY[:-4]}Tinny", "train.seed=1,2"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["hydra/launcher=joblib"], "hydra/launcher means nothing here"),
        (["sweep.force=true"], "sweep.force=true is for sweeps, so it needs -m"),
        (["--force"], "settings are written without dashes: sweep.force="),
        (["-m", "hydra.sweeper.params.train.seed=1", "train.seed=1,2"], "hydra.sweeper.params"),
        (["-m", "experiment=theirs", "train.seed=1,2"], "try sweep.search=tpe"),
        (["-m", "train.seed=range(0)"], "train.seed has no value to sweep over"),
        (["-m", "train.seed=range(0,9,0)"], "train.seed=range(0,9,0): the step of a range"),
        (["-m", "train.seed=choice(1,2),3"], "list all values, as in train.seed=1,2,3"),
        (["train.seed=[range(0,9)]"], "train.seed=[range(0,9)]: choice(), range() and"),
        (["-m", "train.seed=1,2", "hydra.sweep.dir=a,b"], "hydra holds for the sweep"),
        (["--config-path=conf"], "--config-dir FOLDER is searched before it"),
        (["--experimental-rerun", "x.pickle"], "resume RUN"),
        (["--cgf", "job"], "did you mean '--cfg'"),
        (["--nproc_per_node=2"], "without dashes: cluster.ranks_per_node=2"),
        (["--nproc-per-node", "2"], "without dashes: cluster.ranks_per_node=2"),
        (["train.max_epochs=3"], "did you mean 'train.epochs'"),
        (["accumulation.per_device_train_batch_size=3"], "mean 'accumulation.micro_batch'"),
        (["train.precision=bf16-mixed"], "did you mean 'bfloat16'"),
        (["train.precision=16-mixed"], "did you mean 'float16'"),
        (["-m", "train.seed=1,2", "--cfg", "job"], "leave -m out"),
        (["train.seed=1,2"], "add -m"),
        (["schedule.base_lr=interval(0.1,1)"], "is for a sweep: add -m"),
        (["-m", "schedule.base_lr=interval(0.1,1)"], "add sweep.search=tpe"),
        (["+clutser=slurm"], "did you mean 'cluster'"),
        (["-m", "train.seed=1,1"], "all points: they are equal; leave all but one of them out"),
        (
            [*SHARDED, "accumulation.reduction=reproducible", "accumulation.micro_batch=8"],
            "try accumulation.reduction=fast",
        ),
        (
            [*SHARDED, "~optimizer", "+optimizer._target_=torch.optim.Adagrad"],
            "it knows SGD, Adam",
        ),
    ],
)
def test_what_would_be_ignored_is_refused_with_the_way_out(tmp_path, line, words):
    theirs = "# @package _global_\nhydra: {sweeper: {_target_: os.system}}\n"
    conf = folder(tmp_path, experiment__theirs=theirs)
    with pytest.raises(ConfigError, match=re.escape(words)):
        run_app([*line, "--config-dir", conf])


def test_a_setting_is_named_as_it_was_typed():
    with pytest.raises(ConfigError, match=r"^job\.lr=0\.01,0\.1 holds commas"):
        run_app(["job=digits", "job.lr=0.01,0.1"])


def test_a_value_may_refer_to_a_swept_one_that_nothing_else_sets():
    found = points("-m", TINY, "job.width=3,4", "train.updates=${job.width}")
    assert [p.config.train.updates for p in found] == [3, 4]


@pytest.mark.parametrize("named", ["", "nowhere"])
def test_a_folder_of_configurations_has_to_exist(named):
    with pytest.raises(ConfigError, match=f"--config-dir must be a folder, but '{named}' is not"):
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
