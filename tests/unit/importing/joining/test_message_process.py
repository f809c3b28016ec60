import json
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from fakes.intakes import Refused
from stillroom.importing.joining.intake import Intake
from stillroom.importing.joining.join import joined_rows
from stillroom.importing.joining.message_process import MessageProcess, clean_piece
from stillroom.importing.joining.message_store import MessageStore
from stillroom.importing.joining.rollouts import Composer
from stillroom.importing.joining.seen_batch import seen_batch
from stillroom.importing.joining.spill import Spill
from stillroom.importing.records import LoggedConversation, Place, RawCall, Refusal
from stillroom.importing.redaction import Redaction
from stillroom.importing.tally import ImportTally
from stillroom.secrecy.redaction import Redactor
from stillroom.settings import Workspace

CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"b": "c"}'}}
MESSAGES = [
    {"role": "user", "content": "Hi", "cache": True},
    {"role": "user", "content": "mail ann@acme-corp.com"},
    {"role": "developer", "content": [{"type": "text", "text": "Be ü."}]},
    {"role": "user", "content": "the key is correct-horse"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "2"}]},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL, CALL]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    {"role": "user", "content": [{"type": "hologram"}]},
]
OWN = Redactor(["correct-horse"])


def redaction():
    return Redaction(OWN, keep_secrets=False, keep_personal=False)


def given(process, store):
    first, raws = store.take_unseen()
    process.give(store.places[first:], store.sizes[first:])
    return first, raws


def test_a_second_process_cleans_what_has_no_marks_and_leaves_the_rest(tmp_path):
    with (
        Spill(tmp_path) as spill,
        MessageProcess(Workspace(tmp_path), spill, redaction()) as process,
    ):
        store = MessageStore(spill)
        raws = [json.dumps(message).encode() for message in MESSAGES]
        numbers = store.numbers_of(raws[:2])
        seen = []
        for _ in range(2):
            first, new = given(process, store)
            seen.append((process.receive(first), seen_batch(new)))
            numbers = store.numbers_of(raws)
        process.finish()
        pieces = process.pieces(numbers)
    for theirs, ours in seen:
        assert theirs == ours
    assert [piece is None for piece in pieces] == [bool(int(n)) for n in "01010001"]
    expected = [clean_piece(raw, redaction()) for raw in raws[:7]]
    for piece, own in zip(pieces, expected, strict=False):
        assert piece in (None, own)
    assert json.loads(expected[2]) == {"role": "system", "content": "Be ü."}
    assert b"correct-horse" not in expected[3]


def test_the_short_form_of_a_reply_is_left_to_the_first_process(tmp_path):
    reply = {"role": "assistant", "content": "Hello"}
    forms = [{**reply, "refusal": None}, reply, {**reply, "refusal": None, "annotations": []}]
    with (
        Spill(tmp_path) as spill,
        MessageProcess(Workspace(tmp_path), spill, redaction()) as process,
    ):
        store = MessageStore(spill)
        numbers = store.numbers_of([json.dumps(form).encode() for form in forms])
        process.receive(given(process, store)[0])
        process.finish()
        assert [piece is None for piece in process.pieces(numbers)] == [False, True, False]


def rows_of_a_log():
    """Returns rows of every kind, most of which need another one before them."""
    rows, history = [], []
    for turn in range(12):
        history.append({"role": "user", "content": f"mail {turn} to ann@acme-corp.com"})
        reply = {"role": "assistant", "content": f"r{turn} correct-horse", "refusal": None}
        fields = {"group": "s", "tools": None}
        line, messages = len(rows) + 1, [*history, reply]
        if turn % 3 == 0:
            rows.append(
                LoggedConversation(
                    place=Place(Path("l.jsonl"), line), messages=messages, is_call=True, **fields
                )
            )
        else:
            raws = [msgspec.Raw(json.dumps(message).encode()) for message in messages]
            rows.append(RawCall(path=Path("l.jsonl"), line=line, messages=raws, group="s"))
        history.append({"role": "assistant", "content": reply["content"]})
        rows.append(Refusal(Place(Path("l.jsonl"), len(rows) + 1), "no messages"))
    odd = [*MESSAGES, {"role": "tool", "tool_call_id": "lost", "content": "x"}]
    for message in odd:
        call = [message, {"role": "assistant", "content": "ok"}]
        place = Place(Path("l.jsonl"), len(rows) + 1)
        whole = LoggedConversation(place=place, messages=call, is_call=True)
        raws = [msgspec.Raw(json.dumps(each).encode()) for each in call]
        again = lambda whole=whole: [whole]  # noqa: E731
        rows.append(RawCall(path=place.path, line=place.line, messages=raws, reread=again))
        rows.append(LoggedConversation(place=place, messages=call, is_call=False))
    return rows


def imported(folder, *, process, batch=1 << 20, kill_after=None):
    """Returns all that is known of the rollouts of the log, and of the refused rows."""
    refused, own = Refused(), redaction()
    with ExitStack() as stack:
        spill = stack.enter_context(Spill(folder))
        intake = Intake(spill, own, ImportTally(refused, str, str), infers=True)
        second = None
        if process:
            second = stack.enter_context(MessageProcess(Workspace(folder), spill, own))
            intake.share_with(second, batch=batch)
        for number, row in enumerate(rows_of_a_log()):
            if number == kill_after:
                second._process.kill()
                second._process.wait(10)
            intake.take(row, "calls")
        intake.finish()
        if second is not None:
            second.finish()
        joined = joined_rows(intake.rows, intake.tree)
        composer = Composer(intake, joined, own, second)
        rollouts = [composer.compose(row) for row in joined.kept]
        return (
            rollouts,
            refused.rows,
            dict(own.found),
            intake.inferred.schemas(["a"]),
            joined.branch_of,
        )


@pytest.mark.parametrize("batch", [1, 300, 1 << 20])
def test_rollouts_are_the_same_with_a_second_process(tmp_path, batch):
    alone = imported(tmp_path, process=False)
    assert len(alone[0]) > 8
    assert len(alone[1]) > 12
    assert imported(tmp_path, process=True, batch=batch) == alone


@pytest.mark.parametrize("kill_after", [0, 9, 30])
def test_rollouts_are_the_same_if_the_second_process_dies(tmp_path, kill_after):
    alone = imported(tmp_path, process=False)
    assert imported(tmp_path, process=True, batch=300, kill_after=kill_after) == alone
