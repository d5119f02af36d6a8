"""Texts of files and of the command line are what was typed, or are refused."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from orchestrator.config.command_line import CommandLine, to_hydra
from orchestrator.config.composer import Composer, compose
from orchestrator.config.program import program_of
from orchestrator.config.typed_text import TypedFile, text_keys
from orchestrator.errors import ConfigError
from orchestrator.launch import main
from tests.refusals import refused

AWKWARD = (
    "0042",
    "42",
    "007",
    "1e3",
    "1E3",
    "1e-4",
    "1.50",
    "1.0",
    ".5",
    "3.",
    "+5",
    "-0",
    "1_000",
    "0x1F",
    "0b11",
    "0o17",
    "on",
    "off",
    "yes",
    "No",
    "true",
    "TRUE",
    "4:00:00",
    "12:30",
    "1:2.5",
    "2026-11-29",
    "nan",
    ".nan",
    "inf",
    "-inf",
    "16:9",
    "y",
    "n",
)
TABLE_KEYS = ("cluster.environment.A",)
FLAGS = ("cluster.slurm_flags.begin", "cluster.srun_flags.cpu-bind", "job.arguments.lr")


def file_with(text):
    config = OmegaConf.create(text)
    TypedFile(config, text, "", "main.yaml").keep_text()
    return config


@pytest.mark.parametrize("typed", AWKWARD)
def test_every_text_key_of_a_file_holds_what_was_typed(typed):
    for key in sorted({*text_keys(), *TABLE_KEYS}):
        *sections, name = key.split(".")
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(sections)]
        text = "\n".join([*lines, f"{'  ' * len(sections)}{name}: {typed}"])
        assert OmegaConf.select(file_with(text), key) == typed, key


@pytest.mark.parametrize("typed", [typed for typed in AWKWARD if typed != ".nan"])
def test_every_text_key_of_the_line_holds_what_was_typed(typed):
    for key in sorted({*text_keys(), *TABLE_KEYS}):
        for line, values in ((f"{key}={typed}", [typed]), (f"{key}=a,{typed}", ["a", typed])):
            override = to_hydra(line, sweep=len(values) > 1)
            [parsed] = OverridesParser.create().parse_overrides([override])
            found = parsed.value()
            found = found.list if parsed.is_sweep_override() else [found]
            # The schema makes texts of whole numbers and of numbers as Python writes them.
            assert [str(getattr(one, "text", one)) for one in found] == values, key
            assert not any(isinstance(one, bool) for one in found), key


@pytest.mark.parametrize(("typed", "word"), [("1e-4", "1e-4"), ("0.10", "0.10"), ("12", "12")])
def test_numbers_of_a_programs_arguments_are_words_as_typed(tmp_path, typed, word):
    (tmp_path / "main.yaml").write_text(
        "defaults: [base, override job: program, _self_]\n"
        f"job:\n  command: [train.py, --lr, {typed}]\n  arguments: {{lr: {typed}, warm: {typed}}}\n"
    )
    line = [f"job.arguments.warm={typed}", f"job.arguments.more=[{typed},a]"]
    job = compose([*line, "job.argument_style=words"], str(tmp_path), "main").job
    words = ("--lr", word, "--lr", word, "--warm", word, "--more", word, "a")
    assert program_of(job).argv == words


def test_empty_table_of_arguments_is_refused(tmp_path):
    line = ["job=program", "job.command=[train.py]", "job.arguments.x={}"]
    with refused(ConfigError, "job.arguments.x job.arguments.x=VALUE"):
        compose(line)


def test_a_site_file_is_what_it_says(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "site.yaml").write_text(
        "defaults: [slurm, _self_]\ntime_min: 4:00:00\naccount: 0042\npartition: on\nqos: no\n"
        "environment: {A: 010, B: yes}\nslurm_flags: {begin: 16:00, overcommit: true, nice: 5}\n"
        "srun_flags: {cpu-bind: no}\npreamble: [on, module load x]\n"
    )
    cluster = compose(["cluster=site"], str(tmp_path)).cluster
    assert (cluster.time_min, cluster.account, cluster.partition) == (240, "0042", "on")
    assert (cluster.qos, cluster.environment) == ("no", {"A": "010", "B": "yes"})
    assert cluster.slurm_flags == {"begin": "16:00", "overcommit": True, "nice": 5}
    assert cluster.srun_flags == {"cpu-bind": "no"}
    assert cluster.preamble == ["on", "module load x"]


@pytest.mark.parametrize(
    ("typed", "minutes"),
    [("240", 240), ("0240", 240), ("4:00", 4), ("1-12", 2160), ("2-00:00:01", 2881), ("'90'", 90)],
)
def test_a_time_limit_takes_slurms_forms(tmp_path, typed, minutes):
    (tmp_path / "main.yaml").write_text(
        f"defaults: [base, override cluster: slurm, _self_]\ncluster: {{time_min: {typed}}}\n"
    )
    assert compose([], str(tmp_path), "main").cluster.time_min == minutes
    if "'" not in typed:
        line = ["cluster=slurm", f"cluster.time_min={typed}"]
        assert compose(line).cluster.time_min == minutes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        # YAML reads another value than the text:
        ("cluster: {time_min: 4h}", "cluster.time_min 4h"),
        ("cluster: {nodes: 010}", "main.yaml line 2 cluster.nodes 8 '010'"),
        ("job: {ratio: 16:9}", "main.yaml line 2 job.ratio 969 '16:9'"),
        ("cluster: {environment: {NO: x}}", "main.yaml line 2 'NO'"),
        ("run: {name: @x}", "line 2 quotes"),
        ("run: {name: *x}", "line 2 alias quotes"),
        ("run: {name: !x a}", "line 2 '!x' quotes"),
        ("run:\n  name: &x", "main.yaml line 3 run.name '&x'"),
        # The value is no text:
        ("run: {tags: [a, {b: c}]}", "run.tags[1] {'b': 'c'}"),
        ("run: {tags: [null]}", "run.tags[0] null"),
        ("cluster: {environment: {A: {}}}", "cluster.environment.A {}"),
        ("cluster: {environment: {A: null}}", "cluster.environment.A null"),
        ("cluster: {qos: {}}", "cluster.qos {} quotes"),
        ("cluster: {qos: [1]}", "cluster.qos ['1']"),
        ("run: {name: '${x}'}", "run.name ${x} 'x'"),
        ("run: {name: '${x:1}'}", "run.name ${x:…} 'x'"),
        ("run: {name: '${oc.env:NO_X}'}", "run.name NO_X ${oc.env:NO_X,VALUE}"),
        ("transport: null", "transport null"),
    ],
)
def test_value_that_is_not_the_text_in_the_file_is_refused(tmp_path, text, names):
    (tmp_path / "main.yaml").write_text(f"defaults: [base, _self_]\n{text}\n")
    with refused(ConfigError, names):
        compose([], str(tmp_path), "main")


SITE = "cluster:\n  account: ???\ntransport: ???\ntrain: {precision: '???'}\n"


@pytest.mark.parametrize("lacking", ["cluster.account", "transport", "train.precision"])
def test_missing_value_has_to_be_set(tmp_path, lacking):
    (tmp_path / "main.yaml").write_text(
        f"defaults: [base, override cluster: slurm, _self_]\n{SITE}"
    )
    own = {"cluster.account": "a", "transport": "auto", "train.precision": "float32"}
    line = [f"{key}={value}" for key, value in own.items()]
    assert compose(line, str(tmp_path), "main").cluster.account == "a"
    with refused(ConfigError, f"{lacking} main.yaml {lacking}=VALUE"):
        compose([o for o in line if not o.startswith(lacking)], str(tmp_path), "main")
    with refused(ConfigError, f"{lacking} {lacking}=VALUE"):
        compose([*line, f"{lacking}=???"], str(tmp_path), "main")


def test_a_file_that_extends_another_sets_what_that_leaves_open(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "site.yaml").write_text("defaults: [slurm, _self_]\naccount: ???\n")
    (tmp_path / "main.yaml").write_text(
        "defaults: [base, override cluster: site, _self_]\ncluster: {account: a}\n"
    )
    assert compose([], str(tmp_path), "main").cluster.account == "a"
    line = CommandLine(
        overrides=("cluster=site", "cluster.account=a,b"), config_dir=str(tmp_path), multirun=True
    )
    composer = Composer(line)
    composer.compose()
    points = [composer.point(n, given) for n, given in enumerate(composer.combinations())]
    assert [point.config().cluster.account for point in points] == ["a", "b"]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("run.name=a=b", "run.name=a=b run.name=\"'a=b'\""),
        ("run.name=(x)", "run.name=(x) run.name=\"'(x)'\""),
        ("run.name=a(b)", "run.name=a(b) a()"),
        ("run.tags=[x,#]", "run.tags=[x,#] KEY=\"'VALUE'\""),
        ("cluster.environment.A={}", "cluster.environment.A {}"),
    ],
)
def test_unreadable_line_is_refused(typed, names):
    with refused(ConfigError, names):
        compose([typed])


def test_texts_behind_anchors_and_merges_are_kept():
    config = file_with(
        "cluster: {environment: &a {A: 010, B: no}}\nrun: {name: &n 1e3}\n"
        "notify: {command: *n}\njob: {arguments: {<<: *a, B: 007}}\n"
    )
    assert config.job.arguments == {"A": "010", "B": "007"}
    assert (config.run.name, config.notify.command) == ("1e3", "1e3")


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        ("main", "defaults: [_self_, base]\ntrain: {updates: 7}", "main.yaml base _self_"),
        ("cluster/site", "defaults: [_self_, slurm]\nqos: a", "site.yaml slurm _self_"),
        (
            "main",
            "defaults: [base, _self_]\ncluster: slurm",
            "base override cluster slurm",
        ),
        (
            "main",
            "defaults: [base, _self_]\noptimizer: adam",
            "base override optimizer NAME",
        ),
    ],
)
def test_settings_that_would_be_dropped_are_refused(tmp_path, file, text, names):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "main.yaml").write_text("defaults: [base, override cluster: site, _self_]\n")
    (tmp_path / f"{file}.yaml").write_text(text)
    with refused(ConfigError, names):
        compose([], str(tmp_path), "main")


# ------------------------------------------------------------------ Hydra's own settings


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("hydra: {job: {chdir: true, env_set: {A: '1'}}}", "hydra.job.chdir hydra.job.env_set.A"),
        ("hydra: {callbacks: {x: {_target_: y}}}", "hydra.callbacks.x._target_"),
        ("hydra: {sweeper: {max_batch_size: 3}}", "hydra.sweeper.max_batch_size"),
    ],
)
def test_hydra_block_of_a_file_is_refused(tmp_path, capsys, text, keys):
    (tmp_path / "main.yaml").write_text(f"defaults: [base, _self_]\n{text}\n")
    with refused(ConfigError, f"main.yaml {keys}"):
        compose([], str(tmp_path), "main")
    assert main(["--config-dir", str(tmp_path), "--config-name", "main"]) == 2
    assert "hydra.mode" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["launcher", "job_logging"])
def test_a_choice_among_hydras_own_groups_is_refused(tmp_path, group):
    (tmp_path / "main.yaml").write_text(
        f"defaults: [base, override hydra/{group}: basic, _self_]\n"
    )
    with refused(ConfigError, f"main.yaml hydra/{group}"):
        compose([], str(tmp_path), "main")


def test_what_hydras_settings_do_here_stays_possible(tmp_path):
    (tmp_path / "main.yaml").write_text(
        "defaults: [base, _self_]\n"
        "hydra: {job: {chdir: false}, output_subdir: null, sweep: {dir: mine}, mode: RUN}\n"
    )
    assert compose([], str(tmp_path), "main").train.seed == 0
