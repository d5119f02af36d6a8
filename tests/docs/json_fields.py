"""The fields of docs/reference/json.yaml, and which of them commands have printed."""

import json

import yaml
from jsonschema import Draft202012Validator

from tests.docs.printed import ROOT
from tests.helpers import verb

SCHEMAS = yaml.safe_load((ROOT / "docs" / "reference" / "json.yaml").read_text())


class Fields:
    """The fields of a command's schema, by their paths; those that were printed are removed."""

    def __init__(self, name):
        self.schema = SCHEMAS[name]
        self.unseen = {*self._paths(self.schema)}

    def _children(self, schema, value=None):
        """Yield (name in the path, schema, values) of all that a schema has below it."""
        below = value if isinstance(value, list) else []
        if "items" in schema:
            yield "", schema["items"], below
        table = value if isinstance(value, dict) else {}
        for key, inner in schema.get("properties", {}).items():
            yield f"/{key}", inner, [table[key]] if key in table else []
        if isinstance(inner := schema.get("additionalProperties"), dict):
            yield "/*", inner, [*table.values()]

    def _paths(self, schema, path=""):
        for name, inner, _ in self._children(schema):
            yield path + name
            yield from self._paths(inner, path + name)

    def check(self, value):
        """Check what was printed against the schema."""
        Draft202012Validator(self.schema).validate(value)
        self._mark(self.schema, value, "")

    def _mark(self, schema, value, path):
        for name, inner, values in self._children(schema, value):
            for item in values:
                self.unseen.discard(path + name)
                self._mark(inner, item, path + name)


def printed(name, *arguments, codes=(0,), **more):
    """Return what a command prints with `--json`."""
    done = verb(name, "--json", *arguments, **more)
    assert done.returncode in codes, done.stdout + done.stderr
    return json.loads(done.stdout)
