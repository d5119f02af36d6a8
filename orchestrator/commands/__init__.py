"""Commands that are no part of a run: shell completion and new projects."""
