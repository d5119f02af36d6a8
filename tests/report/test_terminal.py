"""What others wrote cannot steer the reader's terminal."""

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.report.terminal import command, harmless, say
from tests.report.conftest import Screen


@given(st.text())
@example("\x1b]0;title\x07x\x1b[2J\x1b(B\x9b31m")
def test_no_control_character_gets_through(text):
    assert not any(ord(c) < 32 and c != "\n" for c in harmless(text))
    assert "\x1b" not in harmless(text)


@given(st.text(alphabet=st.characters(codec="utf-8")))
@example("[/] [red]x[/red] \\[b]")
def test_any_text_can_be_said_on_any_stream(text):
    for encoding in ("ascii", "utf-8", "latin-1"):
        screen = Screen(encoding=encoding)
        say(screen, text)
        assert screen.text.endswith("\n")


def test_brackets_stay_brackets(screen):
    say(screen, "[bold]x[/bold] [/red] :smile: C:\\[dir]")
    assert screen.text == "[bold]x[/bold] [/red] :smile: C:\\[dir]\n"


def test_a_command_can_be_pasted():
    assert command("compare", Path("a b"), Path("$HOME/x")) == (
        "python -m orchestrator compare 'a b' '$HOME/x'"
    )
