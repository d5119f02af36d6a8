"""Hostile command lines, and the config folders that they name, generated from a seed.

`lines(seed, count, folder)` gives argument lists; what they need on disk is made in `folder`.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from orchestrator.config.schema import CHOICES, Config

CANARY = "canary"
DIGITS = "9" * 6000
DEEP = 3000
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    + ["job: {bomb: *a11}"]
)

VALUES = (
    "", "null", "???", "-1", "0", "1", "1.5", "1e9", "1e400", "-1e400", "nan", "inf", "-inf",
    str(2**31), str(2**63), str(2**64 - 1), str(2**64), str(-(2**63)), DIGITS, f"-{DIGITS}",
    f"0.{DIGITS}", f"1e{DIGITS}", "0x10", "1_000", "true", "yes", "[]", "{}", "[1,2", "{a:b", "]",
    "{min:1,max:2}", "{min:2,max:1}", "{min:a}", "[1,2]", "[[[[1]]]]", "{a:{b:{c:1}}}",
    "${train.seed}", "${job}", "${oc.env:HOME}", "${oc.env:NO_SUCH_VARIABLE}", "${hydra:runtime.cwd}",
    "${no.such.key}", "${a:${b:${c}}}", "${dense_parameters:[1]}", "${dense_parameters:a}",
    "${sum_of:1,x}", "${when_null:1}", "${", "}", "$x", "$$", "\\${x}", "${run.dir}", "${.}", "${..}",
    f"$(touch {CANARY})", f"`touch {CANARY}`", f";touch {CANARY}", f"|touch {CANARY}",
    f"a\ntouch {CANARY}", "a\rb", "\x1b[31mred", "\x07", "a\tb", "\x7f", "\u202eright", "\ufeff",
    "ü", "日本", os.fsdecode(b"\xff\xfe"), "~", "~/x", "~nosuchuser/x", "..", "../../..", ".", "/",
    "/dev/zero", "/dev/full", "/dev/null", "/proc/self/mem", "/proc/self/fd/0", "x" * 300,
    "x" * 70_000, "a/" * 3000, "[" * DEEP, "[" * DEEP + "]" * DEEP, "{a:" * DEEP + "1" + "}" * DEEP,
    "(" * DEEP, "'", '"', "''", "'a", "a'b", "a=b", "a,b", ",", ":", "a:b", "@", "#", "%", "&",
    "choice(1,2)", "choice()", "range(1,3)", "range(1,1000000000)", "range(3,1)", "range(1,2,0)",
    "range(0,1,1e-12)", "glob(*)", "shuffle(1,2)", "sort(3,a)", "tag(a,1)", "int(1e999)", "int(x)",
    "float(x)", "bool(3)", "str([1])", "json_str({a:1})", "nosuch(1)", "extend_list(1)", "interval(1,2)",
    f"!!python/object/apply:os.system ['touch {CANARY}']", "os.system", "builtins.exec",
    "subprocess.Popen", "torch.load", "jobs.digits", "jobs.digits.Digits", "Digits", ".", "..a", "a.",
    "a..b", "jobs.digits.Digits.loss", "tests.tiny_job.Tiny", "os.path", "1.2.3", "__main__.X",
)  # fmt: skip

RAW = (
    "=", "==", "+", "++", "~", "~~", "@", "=x", "+=1", "~=", "~x", "~x=1", "~job", "~cluster",
    "~train", "~optimizer", "~accumulation.steps", "~hydra", "job", "job=", "job=null", "job=[digits]",
    "job=[digits,line]", "job={}", "job=3", "job@=digits", "job@x=digits", "job@x.y=line", "/job=line",
    "job/=line", "job/../cluster=slurm", "job=../job/line", "job=/etc/passwd", "cluster=null",
    "cluster=", "cluster=[]", "cluster={}", "cluster=3", "+cluster=slurm,local", "cluster=../cluster/slurm",
    "cluster=/etc/passwd", "+cluster=slurm", "cluster=slurm", "++cluster=slurm", "+cluster=nosuch",
    "train=null", "train=3", "train=[1]", "train={}", "train.updates", "train..updates=1",
    "train.updates.x=1", "train.seed={a:1}", "+train=3", "+train.new=1", "++train.updates=x",
    "optimizer=null", "optimizer={}", "optimizer=adam,sgd", "optimizer=[adam]", "+optimizer=sgd",
    "experiment=", "experiment=null", "experiment=nosuch", "experiment=jepa_240", "tracker=null",
    "accumulation=null", "schedule=[]", "run=null", "facts=null", "engine=null", "defaults=[]",
    "+defaults=[x]", "hydra=null", "hydra=x", "hydra.run.dir=x", "hydra.job.chdir=true",
    "hydra.mode=RUN", "hydra.mode=MULTIRUN", "hydra.mode=x", "hydra.sweep.dir=x", "hydra.nosuch=1",
    "hydra.output_subdir=x", "hydra.verbose=true", "hydra.job_logging=null", "hydra/launcher=joblib",
    "hydra/launcher=nosuch", "hydra/sweeper=optuna", "hydra/launcher=basic", "hydra.launcher._target_=os.system",
    "+hydra.callbacks.x._target_=os.system", "hydra.searchpath=[file:///etc]", "hydra.searchpath=x",
    "hydra.searchpath=[pkg://os]", "hydra.sweeper.params={train.seed:'1,2'}", "--", "-", "---", "-x",
    "--config-name=x", "--config-name=", "--config-name=config", "--config-path=/etc", "--config-dir=",
    "--config-dir=/nosuch", "--config-dir=/etc/passwd", "--config-dir", "--config-dir=/dev/fd/0",
    "-cn", "-cd", "-cp", "--cfg", "--cfg=job", "--cfg=x", "--cfg=all", "--cfg=hydra", "--resolve",
    "--package=x", "--package=_global_", "-p", "--info", "--info=x", "--info=searchpath", "--info=defaults",
    "--hydra-help", "--help", "-h", "--version", "--run", "-r", "--experimental-rerun",
    "--experimental-rerun=x", "--shell-completion", "-sc", "-sc=install", "-m", "--multirun", "-v", "-q",
    "train.py", "lib/ddp.py", "python", "run", "plan", "a b", " ", "  =  ", "a =1", "a= 1",
    "train.updates =3", "key with space=1", "ключ=1", "a.b.c.d.e.f.g=1", "." * 500 + "=1",
    "a." * DEEP + "a=1", "+" + "a." * 200 + "a=1", "0=1", "1.2=3", "+1=2", "null=1", "true=1", "''=1",
)  # fmt: skip

FILES = {
    "empty": b"", "tabs": b"job:\n\twidth: 3\n", "latin1": "job: {_target_: jobs.ü}\n".encode("latin-1"),
    "utf16": "train: {seed: 1}\n".encode("utf-16"), "nul": b"train:\n  seed: \x001\n",
    "bom": "\ufefftrain: {seed: 1}\n".encode(), "twice": b"train: {seed: 1}\ntrain: {seed: 2}\n",
    "twice_inside": b"train: {seed: 1, seed: 2}\n", "missing": b"train: {seed: ???}\n",
    "cycle": b"train: {seed: '${train.updates}', updates: '${train.seed}'}\n",
    "self": b"job: {a: '${job.a}'}\n", "defaults_cycle": b"defaults: [defaults_cycle]\n",
    "defaults_odd": b"defaults: 3\n", "defaults_deep": b"defaults: [{job: {a: b}}]\n",
    "defaults_two": b"defaults: [{job: digits}, {job: line}]\n", "defaults_none": b"defaults: [null]\n",
    "long_int": f"train: {{seed: {DIGITS}}}\n".encode(), "long_float": f"schedule: {{base_lr: 1e{DIGITS}}}\n".encode(),
    "bomb": BOMB.encode(), "deep": b"job: " + b"[" * DEEP + b"]" * DEEP, "deep_map": b"{a: " * DEEP,
    "indented": b"\n".join(b" " * n + b"a:" for n in range(500)), "list": b"- 1\n- 2\n", "scalar": b"3\n",
    "text": b"hello\n", "python": f"!!python/object/apply:os.system ['touch {CANARY}']\n".encode(),
    "python_inside": f"job: !!python/object/apply:os.system ['touch {CANARY}']\n".encode(),
    "python_name": b"job: !!python/name:os.system\n", "binary": b"job: {x: !!binary aGVsbG8=}\n",
    "set": b"job: !!set {a, b}\n", "date": b"job: {_target_: 2001-01-01}\n", "alias": b"train: *nobody\n",
    "recursive": b"job: &a {x: *a}\n", "merge": b"train: {<<: [1]}\n", "int_key": b"1: 2\ntrue: 3\nnull: 4\n",
    "tuple_key": b"? [a, b]\n: 1\n", "none": b"null\n", "package": b"# @package ../../x\ntrain: {seed: 1}\n",
    "package_odd": b"# @package job.${train.seed}\na: 1\n", "unclosed": b"job: {a: 'b\n", "percent": b"%YAML 9.9\n---\na: 1\n",
    "documents": b"---\ntrain: {seed: 1}\n---\ntrain: {seed: 2}\n", "long_line": b"job: {a: " + b"x" * 3_000_000 + b"}\n",
    "many_keys": b"job:\n" + b"".join(b"  k%d: 1\n" % n for n in range(200_000)),
    "random": bytes(random.Random(3).randbytes(4096)), "huge_nodes": b"cluster: {nodes: 1000000000}\n",
    "hydra": b"hydra: {run: {dir: x}}\n", "hydra_odd": b"hydra: 3\n", "fine": b"# @package _global_\ntrain: {seed: 5}\n",
    "escape": b'job: {a: "\\e[31m"}\n', "wrong_types": b"train: [1]\ncluster: 3\naccumulation: x\n",
}  # fmt: skip

FOLDERS = (
    "plain", "with,comma", "with'quote", 'with"double', "with=equals", "mit-ü", "~tilde", "with space",
    "with[bracket", "with{brace", "with$dollar", "with:colon", "with#hash", "with\\backslash", "with%25",
    "with\nnewline", "-dash", "${oc.env:HOME}", "ends ", "a" * 200,
)  # fmt: skip
GROUPS = ("job", "cluster", "experiment", "optimizer", "tracker", "nosuch")


@dataclass(frozen=True)
class Line:
    """A module to run with arguments, standing in a folder, with more environment."""

    module: str
    arguments: tuple[str, ...]
    folder: str
    environment: dict[str, str] = field(default_factory=dict)


def _keys() -> list[str]:
    found = ["transport", "job._target_", "job.width", "job.new", "optimizer.name", "optimizer.lr"]
    for section, values in asdict(Config()).items():
        if isinstance(values, dict):
            found += [section, *(f"{section}.{key}" for key in values)]
    return [*found, *CHOICES, "hydra.run.dir", "hydra.sweep.dir", "cluster.environment.run",
            "cluster.environment.A", "cluster.slurm_flags.x", "cluster.nodes.min"]  # fmt: skip


def make_folders(folder: Path) -> list[Path]:
    """Config folders with one hostile file of each kind, under every hostile name."""
    made = []
    for name in FOLDERS:
        configs = folder / name
        configs.mkdir()
        made.append(configs)
        for group in (".", *GROUPS):
            (configs / group).mkdir(exist_ok=True)
    for group in (".", *GROUPS):
        for stem, content in FILES.items():
            (made[0] / group / f"{stem}.yaml").write_bytes(content)
        (made[0] / group / "folder.yaml").mkdir()
        os.mkfifo(made[0] / group / "fifo.yaml")
        (made[0] / group / "zero.yaml").symlink_to("/dev/zero")
        (made[0] / group / "loop.yaml").symlink_to("loop.yaml")
    for configs in made[1:]:
        (configs / "experiment" / "fine.yaml").write_bytes(FILES["fine"])
    return made


def lines(seed: int, count: int, folder: Path) -> Iterator[Line]:
    """`count` command lines; the same seed gives the same ones."""
    chance = random.Random(seed)
    configs = make_folders(folder)
    keys, stems = _keys(), [*FILES, "folder", "fifo", "zero", "loop", "nosuch"]

    def override() -> str:
        kind = chance.random()
        if kind < 0.6:
            return chance.choice(["", "", "", "+", "++", "~"]) + (
                f"{chance.choice(keys)}={chance.choice(VALUES)}"
            )
        if kind < 0.9:
            return chance.choice(RAW)
        noise = chance.choices("abc=+~@${}[]()'\",:. \\/*-0\t\n\x1bü", k=chance.randrange(1, 40))
        return "".join(noise)

    for _ in range(count):
        arguments = [override() for _ in range(chance.choice((1, 1, 1, 2, 3)))]
        if chance.random() < 0.35:
            where = configs[0] if chance.random() < 0.7 else chance.choice(configs)
            stem = chance.choice(stems) if where == configs[0] else "fine"
            group = chance.choice(GROUPS[:5])
            own = [
                f"--config-dir={where}",
                f"{'+' if group in {'cluster', 'experiment'} else ''}{group}={stem}",
            ]
            if chance.random() < 0.2:
                own = [f"--config-dir={where}", f"--config-name={stem}"]
            arguments = own + (arguments if chance.random() < 0.3 else [])
        way = chance.random()
        environment: dict[str, str] = {}
        if chance.random() < 0.1:
            environment = chance.choice(
                [{"COLUMNS": "x"}, {"COLUMNS": "1"}, {"LANG": "C", "LC_ALL": "C"}, {"HOME": ""},
                 {"TERM": "dumb"}, {"PYTHONIOENCODING": "ascii"}, {"SLURM_CONF": "/nosuch"}]
            )  # fmt: skip
        place = "gone" if chance.random() < 0.03 else "."
        if way < 0.45:
            module, tail = "orchestrator", ["plan", *arguments]
        elif way < 0.6:
            module, tail = "orchestrator.launch", [*arguments, "--cfg", "job"]
        elif way < 0.75:
            module, tail = "orchestrator.launch", ["-m", *arguments, "run.dir=/proc/nowhere"]
        elif way < 0.9:
            module, tail = "orchestrator.launch", [*arguments, "run.dir=/proc/nowhere"]
        else:
            verb = chance.choice(["resume", "status", "logs", "cancel", "compare", "nosuch"])
            paths = [chance.choice([*VALUES, str(configs[0] / "job" / "fifo.yaml"), str(folder)])
                     for _ in range(2 if verb == "compare" else 1)]  # fmt: skip
            module, tail = "orchestrator", [verb, *paths]
        yield Line(module, tuple(a.replace("\0", "") for a in tail), place, environment)
