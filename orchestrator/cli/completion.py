"""What a shell may complete an override to: Hydra's own completion, over the composer's loader."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from orchestrator.errors import ConfigError


def words_so_far(environment: Mapping[str, str], args: Sequence[str], incomplete: str) -> list[str]:
    """Return the words of the line up to the cursor, the one to complete last.

    bash takes `=` for the end of a word, so that `job=di` arrives as three.

    >>> words_so_far({"COMP_WORDS": "orchestrator launch job = di", "COMP_CWORD": "4"}, [], "di")
    ['launch', 'job=di']
    """
    if "COMP_WORDS" not in environment:
        return [*args, incomplete]
    try:
        split = shlex.split(environment["COMP_WORDS"])
    except ValueError:  # an open quote
        split = environment["COMP_WORDS"].split()
    given = split[1 : int(environment["COMP_CWORD"]) + 1]
    if not incomplete and given[-1:] != ["="]:
        given.append("")
    words: list[str] = []
    for word in given:
        if words and (word == "=" or words[-1].endswith("=")):
            words[-1] += word
        else:
            words.append(word)
    return words


def complete_overrides(args: list[str], incomplete: str) -> list[str]:
    """Return overrides that begin as the last word does: groups, choices, keys and values."""
    words = words_so_far(os.environ, args, incomplete)
    try:
        found = _asked_of_hydra(words[1:])
    except ConfigError:  # the words before it compose nothing; a tab is no place to say so
        return []
    # Where the shell has cut the word at a `=`, it wants the rest alone.
    cut = 0 if incomplete == words[-1] else words[-1].rfind("=") + 1
    return [word[cut:] for word in found]


def _asked_of_hydra(words: Sequence[str]) -> list[str]:
    from orchestrator.config.command_line import read_command_line, spelled
    from orchestrator.config.composer import Composer, OverrideCompletion
    from orchestrator.config.messages import config_errors

    *before, word = words or [""]
    line = read_command_line([w for w in before if w.startswith("-") or "=" in w or "~" in w])
    composer = Composer(line)
    flag = ["--multirun"] if line.multirun else []
    with config_errors():
        typed = [spelled(override, sweep=line.multirun) for override in line.overrides]
        asked = " ".join([*flag, *(o for o in typed if not o.split()[1:]), word])
        found = OverrideCompletion(composer.loader).choices(line.config_name, asked)
    return [choice for choice in found if not choice.startswith("hydra")]
