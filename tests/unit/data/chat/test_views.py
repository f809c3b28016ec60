"""Tokens as people see them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.conversations import LAMP, PRICE, answer, calls, reply, system, user
from fakes.mask_families import MASK_FAMILIES, mask_tokenizer
from stillroom.data.chat.render import ChatRenderer
from stillroom.data.chat.views import sequence_view

RENDERERS = {name: ChatRenderer(mask_tokenizer(MASK_FAMILIES[name])) for name in ("chatml", "phi")}
TALK = [
    system("SYSTEM Be brief."),
    user("USER The lamp?"),
    calls(LAMP),
    reply("REPLY 12"),
    answer("It costs 12."),
]


def roles_of(view) -> dict[str, str]:
    """The text that each role says."""
    said: dict[str, str] = {}
    for piece in view.pieces:
        said[piece.role] = said.get(piece.role, "") + piece.text
    return said


def view_of(messages, *, limit=5000, name="chatml", **options):
    renderer = RENDERERS[name]
    rendered = renderer.conversation(messages, [PRICE], **options)
    return sequence_view(None, rendered, messages, renderer, limit=limit)


def test_each_token_has_the_role_of_who_says_it():
    said = roles_of(view_of(TALK))

    assert said["system"] == "SYSTEM Be brief."
    assert said["user"] == "USER The lamp?"
    assert said["tool"] == "REPLY 12"
    assert said["assistant"].endswith("It costs 12.<|im_end|>")
    assert "<|im_start|>" in said["template"]


def test_an_answer_that_was_given_is_the_assistants_and_not_trained():
    view = view_of([user("a"), answer("before"), user("c"), answer("now")], num_given_turns=1)

    given = [p for p in view.pieces if p.role == "assistant" and not p.is_trained]
    assert "".join(piece.text for piece in given) == "before"


def test_a_long_sequence_is_shown_to_its_limit_and_counted_whole():
    whole, cut = view_of(TALK), view_of(TALK, limit=10)

    assert sum(len(piece.ids) for piece in cut.pieces) == 10
    assert cut.num_left_out == whole.num_tokens - 10
    assert (cut.num_tokens, cut.num_trained) == (whole.num_tokens, whole.num_trained)


@settings(max_examples=40)
@given(st.sampled_from(["chatml", "phi"]), st.text(max_size=20), st.text(max_size=20))
def test_the_pieces_add_up_to_the_text_whatever_is_said(name, requested, answered):
    view = view_of([system("s"), user(requested), answer(answered)], name=name)

    rendered = RENDERERS[name].conversation(
        [system("s"), user(requested), answer(answered)], [PRICE]
    )
    assert "".join(piece.text for piece in view.pieces) == rendered.text
    assert sum(len(p.ids) for p in view.pieces if p.is_trained) == view.num_trained
