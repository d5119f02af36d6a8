"""What `--cfg job` shows is what config.yaml of a run says, and nothing that was stated is lost."""

import tempfile
from pathlib import Path

import yaml
from hypothesis import HealthCheck, Phase, given, settings

from orchestrator.config.command_line import read_command_line
from orchestrator.config.composer import Composer
from orchestrator.config.reading import read_config, to_yaml
from orchestrator.launch import run_app
from tests.laws.composition import cases

ABSENT = object()


def select(tree, dotted):
    for part in dotted.split("."):
        tree = tree.get(part, ABSENT) if isinstance(tree, dict) else ABSENT
    return tree


@settings(
    max_examples=12,
    deadline=None,
    print_blob=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a case is small as it is
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_what_is_shown_is_what_runs_and_holds_all_that_was_stated(case, capsys):
    with tempfile.TemporaryDirectory() as name:
        case.write(Path(name))
        line = ["--config-dir", name, *case.line]
        capsys.readouterr()
        assert run_app([*line, "--cfg", "job"]) == 0
        shown = capsys.readouterr().out
        config = Composer(read_command_line(line)).compose().config()
        assert shown == to_yaml(config), "what `start` writes into config.yaml"
        assert read_config(yaml.safe_load(shown)) == config, "what a rank reads from it"
        wrong = {
            key: (value, found)
            for key, value in case.expected().items()
            if (found := select(yaml.safe_load(shown), key)) != value
        }
        assert not wrong, f"stated and shown: {wrong}"
