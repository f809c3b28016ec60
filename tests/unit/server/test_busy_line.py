"""A command on a terminal shows that it is working, and elsewhere prints only what is reported."""

import io

import pytest

from fakes.waiting import wait_until
from stillroom_mcp import busy_line
from stillroom_mcp.busy_line import BusyLine


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes standard error a terminal; in the test itself, since pytest sets it before the test."""
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    return shown


def test_a_terminal_shows_the_command_and_then_what_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(busy_line, "DELAY_S", 0.0)
    with BusyLine("plan-training") as line:
        wait_until(lambda: "plan-training" in terminal.getvalue())
        line.show("rendering [rows]")
        wait_until(lambda: "rendering [rows]" in terminal.getvalue())


def test_a_quick_command_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with BusyLine("list-runs"):
        pass
    assert terminal.getvalue() == ""


def test_a_pipe_gets_reports_as_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    with BusyLine("plan-training") as line:
        line.show("rendering rows")
    assert capsys.readouterr().err == "rendering rows\n"
