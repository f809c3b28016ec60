"""Messages come whole or not at all, whatever else a machine prints."""

import io

import pytest

from stillroom.errors import EngineError
from stillroom.remote.channel import LocalChannel, run_command, run_script, shell_words
from stillroom.remote.frames import BrokenStreamError, Frames
from stillroom.remote.host import MachineError, MachineGoneError, UnreachableError


def written(*messages: object, ends: bool = True) -> bytes:
    sink = io.BytesIO()
    frames = Frames(io.BytesIO(), sink)
    frames.begin()
    for message in messages:
        frames.send(message)
    if ends:
        frames.end()
    return sink.getvalue()


def reading(data: bytes) -> Frames:
    return Frames(io.BytesIO(data), io.BytesIO())


@pytest.mark.parametrize("greeting", [b"", b"Welcome!\n", b"no end", b"--stillroom", b"\x00\xff"])
def test_what_a_machine_prints_first_is_passed_over(greeting):
    frames = reading(greeting + written({"a": b"\x00\n"}, "b"))

    assert frames.skip_greeting() == greeting
    assert frames.receive(dict[str, bytes]) == {"a": b"\x00\n"}
    assert frames.receive(str) == "b"
    assert frames.receive(str) is None


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_stream_that_is_cut_anywhere_is_never_a_shorter_one(cut):
    frames = reading(written(b"x" * 9)[:-cut])

    with pytest.raises(BrokenStreamError):  # noqa: PT012 - any of the three may be the one
        frames.skip_greeting()
        while frames.receive(bytes) is not None:
            pass


def test_what_is_no_message_is_quoted():
    frames = reading(written("a", ends=False) + b"Killed\n")
    frames.skip_greeting()
    frames.receive(str)

    with pytest.raises(BrokenStreamError, match="Killed"):
        frames.receive(str)


def test_an_error_of_the_other_side_is_raised():
    sink = io.BytesIO()
    Frames(io.BytesIO(), sink).send_error(EngineError("no room", "make some"))

    with pytest.raises(EngineError, match="no room") as caught:
        reading(sink.getvalue()).receive(str)
    assert caught.value.fix == "make some"
    assert not isinstance(caught.value, MachineGoneError)


def test_what_will_never_be_there_again_stays_so_on_the_way():
    sink = io.BytesIO()
    Frames(io.BytesIO(), sink).send_error(MachineGoneError("no run r1", "start it anew"))

    with pytest.raises(MachineGoneError, match="no run r1"):
        reading(sink.getvalue()).receive(str)


def test_a_command_that_cannot_be_found_says_so():
    with (
        pytest.raises(UnreachableError, match="no-such-program"),
        run_command(LocalChannel(), "exec no-such-program"),
    ):
        pass


def test_a_script_of_several_lines_reaches_the_machine_as_it_is():
    script = 'a="x\\ny"\nprintf \'%s\\n\' "$a" \'it"s\'\ncat'
    with run_script(LocalChannel(), script) as running:
        running.write(b"given\n")
        assert list(running.lines()) == ["x\\ny", 'it"s', "given", ""]


@pytest.mark.parametrize(
    ("printed", "fix"),
    [
        ("tar: No space left on device", "free some space"),
        ("mkdir: Permission denied", "folder:"),
        ("odd", "fix what it names"),
    ],
)
def test_a_script_that_fails_says_what_to_do(printed, fix):
    with (
        pytest.raises(MachineError, match=printed) as caught,
        run_script(LocalChannel(), f"echo '{printed}' >&2; exit 3") as running,
    ):
        list(running.lines())
    assert fix in caught.value.fix


def test_a_script_that_breaks_off_is_no_end():
    with (
        pytest.raises(UnreachableError, match="connection to this machine lost"),
        run_script(LocalChannel(), "echo a; kill -9 $$") as running,
    ):
        list(running.lines())


@pytest.mark.parametrize(
    "word", ["a b", "it's", "$HOME", "a;b", "*", 'say "no"', "\\", "!x", "~x", "a\nb", "\\n"]
)
def test_a_word_reaches_the_machine_as_it_is(word):
    line = f"printf %s {shell_words([word])}"
    with run_script(LocalChannel(), line) as running:
        assert "\n".join(running.lines()) == word


def test_messages_that_are_alike_cost_little() -> None:
    sink = io.BytesIO()
    sender = Frames(io.BytesIO(), sink)
    states = [{"step": step, "notes": ["a long note"] * 50} for step in range(20)]
    sizes = []
    for state in states:
        before = sink.tell()
        sender.send(state, is_packed=True)
        sender.send(b"as it is")
        sizes.append(sink.tell() - before)
    receiver = reading(sink.getvalue())
    for state in states:
        assert receiver.receive(dict) == state
        assert receiver.receive(bytes) == b"as it is"
    assert max(sizes[1:]) < 100


def test_a_packed_message_that_is_damaged_breaks_the_stream() -> None:
    sink = io.BytesIO()
    Frames(io.BytesIO(), sink).send("text" * 100, is_packed=True)
    head, _, body = sink.getvalue().partition(b"\n")
    with pytest.raises(BrokenStreamError, match="cannot be unpacked"):
        reading(head + b"\n" + b"x" * len(body)).receive(str)
