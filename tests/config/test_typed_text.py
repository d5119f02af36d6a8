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


def test_an_empty_table_among_a_programs_arguments_is_refused(tmp_path):
    line = ["job=program", "job.command=[train.py]", "job.arguments.x={}"]
    with pytest.raises(ConfigError, match=r"job\.arguments\.x is an empty table.*x=VALUE"):
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
    ("text", "said"),
    [
        ("cluster: {time_min: 4h}", "cluster.time_min is a time limit, as minutes .* but is '4h'"),
        ("cluster: {nodes: 010}", "line 2: cluster.nodes: 010 is 8 to YAML, .* in base 8"),
        ("job: {ratio: 16:9}", "line 2: job.ratio: 16:9 is 969 to YAML, .* in base 60"),
        ("cluster: {environment: {NO: x}}", "the key NO is a boolean to YAML"),
        ("run: {name: @x}", "line 2: found character .*sign is put in quotes"),
        ("run: {name: *x}", "line 2: found undefined alias.*sign is put in quotes"),
        ("run: {name: !x a}", "line 2: .* the tag '!x'; .*sign is put in quotes"),
        ("run:\n  name: &x", "line 3: run.name: &x names a value for YAML.*'&x' in quotes"),
    ],
)
def test_what_yaml_reads_in_another_way_is_refused_with_its_line(tmp_path, text, said):
    (tmp_path / "main.yaml").write_text(f"defaults: [base, _self_]\n{text}\n")
    with pytest.raises(ConfigError, match=said):
        compose([], str(tmp_path), "main")


SITE = "cluster:\n  account: ???\ntransport: ???\ntrain: {precision: '???'}\n"


@pytest.mark.parametrize("lacking", ["cluster.account", "transport", "train.precision"])
def test_a_value_that_a_file_leaves_open_has_to_be_set(tmp_path, lacking):
    (tmp_path / "main.yaml").write_text(
        f"defaults: [base, override cluster: slurm, _self_]\n{SITE}"
    )
    own = {"cluster.account": "a", "transport": "auto", "train.precision": "float32"}
    line = [f"{key}={value}" for key, value in own.items()]
    assert compose(line, str(tmp_path), "main").cluster.account == "a"
    with pytest.raises(
        ConfigError,
        match=rf"^{lacking} is \?\?\? in main\.yaml, so it has to be set: {lacking}=VALUE$",
    ):
        compose([o for o in line if not o.startswith(lacking)], str(tmp_path), "main")
    with pytest.raises(ConfigError, match=rf"^{lacking} is \?\?\?, so it has to be set"):
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
    ("text", "said"),
    [
        ("run: {tags: [a, {b: c}]}", r"run.tags\[1\] must be a text, but is {'b': 'c'}"),
        ("run: {tags: [null]}", r"run.tags\[0\] cannot be null"),
        ("cluster: {environment: {A: {}}}", r"cluster.environment.A must be a text, but is {}"),
        ("cluster: {environment: {A: null}}", "cluster.environment.A cannot be null"),
        ("cluster: {qos: {}}", r"cluster.qos must be a text, but is {}.*put a text in quotes"),
        ("cluster: {qos: [1]}", r"cluster.qos must be a text, but is \['1'\]"),
        ("run: {name: '${x}'}", r"run.name refers to \${x}, but there is no key 'x'"),
        ("run: {name: '${x:1}'}", r"run.name refers to \${x:…}, but nothing resolves 'x'"),
        ("run: {name: '${oc.env:NO_X}'}", "refers to the environment variable NO_X, which is not"),
        ("transport: null", "transport cannot be null; leave it out"),
    ],
)
def test_a_value_that_is_no_text_is_refused_in_our_words(tmp_path, text, said):
    (tmp_path / "main.yaml").write_text(f"defaults: [base, _self_]\n{text}\n")
    with pytest.raises(ConfigError, match=said):
        compose([], str(tmp_path), "main")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run.name=a=b", "a letter needs quotes; .* as in run.name=\"'a=b'\"$"),
        ("run.name=(x)", "a letter needs quotes; .* as in run.name=\"'\\(x\\)'\"$"),
        ("run.name=a(b)", r"there is no function a\(\); "),
        ("run.tags=[x,#]", "a letter needs quotes; .* as in KEY="),
        ("cluster.environment.A={}", "cluster.environment.A must be a text, but is {}"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused_in_our_words(typed, said):
    with pytest.raises(ConfigError, match=said):
        compose([typed])


def test_texts_behind_anchors_and_merges_are_kept():
    config = file_with(
        "cluster: {environment: &a {A: 010, B: no}}\nrun: {name: &n 1e3}\n"
        "notify: {command: *n}\njob: {arguments: {<<: *a, B: 007}}\n"
    )
    assert config.job.arguments == {"A": "010", "B": "007"}
    assert (config.run.name, config.notify.command) == ("1e3", "1e3")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("main", "defaults: [_self_, base]\ntrain: {updates: 7}", "list base after _self_.*own"),
        ("cluster/site", "defaults: [_self_, slurm]\nqos: a", "site.yaml: its defaults list slurm"),
        ("main", "defaults: [base, _self_]\ncluster: slurm", "base: override cluster: slurm"),
        ("main", "defaults: [base, _self_]\noptimizer: adam", "base: override optimizer: NAME"),
    ],
)
def test_settings_that_would_be_dropped_are_refused(tmp_path, file, text, said):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "main.yaml").write_text("defaults: [base, override cluster: site, _self_]\n")
    (tmp_path / f"{file}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        compose([], str(tmp_path), "main")


# ------------------------------------------------------------------ Hydra's own settings


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("hydra: {job: {chdir: true, env_set: {A: '1'}}}", r"hydra\.job\.chdir and .*env_set\.A"),
        ("hydra: {callbacks: {x: {_target_: y}}}", r"hydra\.callbacks\.x\._target_ means"),
        ("hydra: {sweeper: {max_batch_size: 3}}", r"hydra\.sweeper\.max_batch_size means"),
    ],
)
def test_a_hydra_block_of_ones_own_file_is_refused_as_on_the_line(tmp_path, capsys, text, keys):
    (tmp_path / "main.yaml").write_text(f"defaults: [base, _self_]\n{text}\n")
    with pytest.raises(ConfigError, match=rf"main\.yaml: {keys}"):
        compose([], str(tmp_path), "main")
    assert main(["--config-dir", str(tmp_path), "--config-name", "main"]) == 2
    assert "hydra.mode" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["launcher", "job_logging"])
def test_a_choice_among_hydras_own_groups_is_refused(tmp_path, group):
    (tmp_path / "main.yaml").write_text(
        f"defaults: [base, override hydra/{group}: basic, _self_]\n"
    )
    with pytest.raises(ConfigError, match=rf"main\.yaml: hydra/{group} means nothing here"):
        compose([], str(tmp_path), "main")


def test_what_hydras_settings_do_here_stays_possible(tmp_path):
    (tmp_path / "main.yaml").write_text(
        "defaults: [base, _self_]\n"
        "hydra: {job: {chdir: false}, output_subdir: null, sweep: {dir: mine}, mode: RUN}\n"
    )
    assert compose([], str(tmp_path), "main").train.seed == 0
