"""A tracker that writes each update's scalars as a line of JSON.

python -m orchestrator.launch tracker.kind=lines tracker.options.file=mine.jsonl ...
"""

import json
from dataclasses import dataclass

from orchestrator.trainer.recorder import Tracker


@dataclass
class Options:
    file: str = "scalars.jsonl"


class Lines(Tracker):
    Options = Options
    title = "the lines of scalars"

    def write(self, step, values):
        with (self.run.path / self.options.file).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
