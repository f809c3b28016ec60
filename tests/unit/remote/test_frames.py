"""Messages come whole or not at all, whatever else a machine prints."""

import io
import math
import sys

import pytest

from stillroom.errors import EngineError
from stillroom.remote import channel
from stillroom.remote.channel import (
    LocalChannel,
    PipedProcess,
    run_command,
    run_script,
    shell_words,
)
from stillroom.remote.frames import MARK, BrokenStreamError, Frames
from stillroom.remote.host import MachineError, MachineGoneError, UnreachableError
from stillroom.remote.records import RunUpdate
from stillroom.remote.ssh.probe import probe


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


def framed(message: object) -> bytes:
    sink = io.BytesIO()
    Frames(io.BytesIO(), sink).send(message)
    return sink.getvalue()


NO_HASH = {"path": "a", "sha256": "../../.ssh/config", "num_bytes": 1}
NO_SIZE = {"path": "a", "sha256": "0" * 64, "num_bytes": -1}


class NoisyChannel(LocalChannel):
    """A machine on which each shell runs a command of its own after the mark and before ours."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self._noise = noise

    def open(self) -> PipedProcess:
        line = f'IFS= read -r line; echo {MARK.decode().strip()}; {self._noise}; eval "$line"'
        return PipedProcess(["sh", "-c", line])


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


@pytest.mark.parametrize("kind", [EngineError, MachineGoneError])
def test_an_error_of_the_other_side_is_raised(kind):
    sink = io.BytesIO()
    Frames(io.BytesIO(), sink).send_error(kind("no room", "make some"))

    with pytest.raises(EngineError, match="no room") as caught:
        reading(sink.getvalue()).receive(str)
    assert caught.value.problem == "no room\nthe machine's advice: make some"
    assert "make some" not in caught.value.fix
    assert type(caught.value) is kind


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
        ("odd", "fix the cause on the machine"),
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
        sender.send(state, is_compressed=True)
        sender.send(b"as it is")
        sizes.append(sink.tell() - before)
    receiver = reading(sink.getvalue())
    for state in states:
        assert receiver.receive(dict) == state
        assert receiver.receive(bytes) == b"as it is"
    assert max(sizes[1:]) < 100


def test_a_packed_message_that_is_damaged_breaks_the_stream() -> None:
    sink = io.BytesIO()
    Frames(io.BytesIO(), sink).send("text" * 100, is_compressed=True)
    head, _, body = sink.getvalue().partition(b"\n")
    with pytest.raises(BrokenStreamError, match="cannot be decompressed"):
        reading(head + b"\n" + b"x" * len(body)).receive(str)


DEEP = 200_000
A_STATE = {"type": "state", "run_json": b"{}", "elapsed_s": 1.0, "root": "/r", "clock": 1.0}


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b'{"length":-1}\n', object),
        (b'{"length":1e18}\n', object),
        (b'{"length":268435457}\n', object),
        (b"x" * 5000, object),
        (b'{"length":%d}\n' % DEEP + b"\x91" * DEEP, object),
        # An array of 4 billion items, of which none follows.
        (b'{"length":5}\n\xdd\xff\xff\xff\xff', list[int]),
        (framed({"type": "files", "files": [NO_HASH], "is_last": True}), RunUpdate),
        (framed({"type": "files", "files": [NO_SIZE], "is_last": True}), RunUpdate),
        (framed({"type": "growth", "path": "a/" * 5000, "offset": 0, "data": b""}), RunUpdate),
        (framed({"type": "growth", "path": "a", "offset": -1, "data": b""}), RunUpdate),
        *(
            (framed({**A_STATE, "clock": clock}), RunUpdate)
            for clock in (math.nan, math.inf, 1e300)
        ),
        (framed({**A_STATE, "elapsed_s": math.nan}), RunUpdate),
    ],
)
def test_a_message_beyond_all_bounds_breaks_the_stream(stream, kind):
    with pytest.raises(BrokenStreamError):
        reading(stream).receive(kind)


@pytest.mark.parametrize("script", ["yes words", "yes words | tr -d '\\n'"])
def test_a_machine_that_prints_without_end_is_cut_off(script):
    with (
        pytest.raises(MachineError, match="printed more than 8 MB"),
        run_script(LocalChannel(), script) as running,
    ):
        assert all(len(line) <= 8 << 20 for line in running.lines())


def test_of_errors_without_end_the_last_are_kept_and_no_file_grows():
    with (
        pytest.raises(MachineError, match="the last words") as caught,
        run_script(
            LocalChannel(), "yes word | head -c 5000000 >&2; echo the last words >&2; exit 3"
        ) as running,
    ):
        list(running.lines())
    assert len(caught.value.problem) < 2000


@pytest.mark.parametrize("code", ["", "x", "9" * 5000, "-1"])
def test_an_end_of_a_script_that_is_none_is_a_line(code):
    end = channel._SCRIPT_END_MARK
    with run_script(LocalChannel(), f"echo '{end}{code}'") as running:
        assert next(running.lines()) == end + code


def test_what_a_machine_prints_into_its_probe_is_passed_over(tmp_path):
    odd = [
        "python none", "python 3.x 1 /usr/bin/python", f"python {'9' * 9999}.1.1 1 /p",
        f"gpu {'9' * 400}, d, name", "gpu ², d, name", f"processors {'9' * 400}", "disk 1e99",
        "memory max", "clock never", "[" * 100_000, *["gpu 1, 2, 3"] * 5000,
    ]  # fmt: skip
    (tmp_path / "odd").write_text("\n".join(odd) + "\n", encoding="utf-8")
    greeting = f"cat {tmp_path / 'odd'}"
    noisy = NoisyChannel(greeting)
    found = probe(noisy, str(tmp_path), code="none", pythons=[sys.executable])
    assert [python.path for python in found.pythons] == [sys.executable]
    assert len(found.facts.gpus) <= 64
    assert found.facts.num_processors
    assert found.facts.free_disk_gb
