import json

from stillroom.importing.joining.cleaning import CleaningProcess, clean_piece
from stillroom.importing.joining.message_store import MessageStore
from stillroom.importing.joining.spill import Spill
from stillroom.importing.redaction import Redaction
from stillroom.secrecy.redaction import Redactor
from stillroom.settings import Workspace

MESSAGES = [
    {"role": "user", "content": "Hi", "cache": True},
    {"role": "user", "content": "mail ann@acme-corp.com"},
    {"role": "developer", "content": [{"type": "text", "text": "Be ü."}]},
    {"role": "user", "content": "the key is correct-horse"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"b": "c"}'}}]},
]  # fmt: skip


def test_a_second_process_cleans_what_has_no_marks_and_leaves_the_rest(tmp_path):
    redaction = Redaction(Redactor(["correct-horse"]), keep_secrets=False, keep_personal=False)
    with (
        Spill(tmp_path) as spill,
        CleaningProcess(Workspace(tmp_path), spill, redaction) as cleaning,
    ):
        store = MessageStore(spill)
        raws = [json.dumps(message).encode() for message in MESSAGES]
        numbers = store.numbers_of(raws[:2])
        cleaning.give(store.places, store.sizes)
        numbers += store.numbers_of(raws)
        cleaning.give(store.places, store.sizes)
        cleaning.finish()
        pieces = [cleaning.piece(number) for number in numbers[2:]]
    expected = [clean_piece(raw, redaction) for raw in raws]
    assert [piece is None for piece in pieces] == [False, True, False, True, False]
    for piece, own in zip(pieces, expected, strict=True):
        assert piece in (None, own)
    assert json.loads(expected[2]) == {"role": "system", "content": "Be ü."}
    assert b"correct-horse" not in expected[3]


def test_without_the_second_process_nothing_is_clean_and_nothing_fails(tmp_path):
    redaction = Redaction(Redactor(()), keep_secrets=False, keep_personal=False)
    with (
        Spill(tmp_path) as spill,
        CleaningProcess(Workspace(tmp_path), spill, redaction) as cleaning,
    ):
        store = MessageStore(spill)
        [number] = store.numbers_of([json.dumps(MESSAGES[0]).encode()])
        cleaning._process.kill()
        cleaning._process.wait()
        cleaning.give(store.places, store.sizes)
        cleaning.finish()
        assert cleaning.piece(number) is None
