"""Facts that can be compared, however they were read."""

import msgspec

from stillroom.curate.rows.facts import Chat, RolloutFacts


def in_full(facts: RolloutFacts | None) -> RolloutFacts | None:
    """The facts with their messages decoded, of which the last one is what was said to be it."""
    if facts is None:
        return None
    chat, messages = facts.chat, facts.messages
    last = chat.last
    if isinstance(last, msgspec.Raw):
        assert msgspec.json.decode(last, type=type(messages[-1])) == messages[-1]
    decoded = Chat(messages, messages[-1] if messages else None, chat.num_turns, chat.is_open)
    assert (last is None) == (not messages)
    assert decoded.has_final_answer == facts.has_final_answer
    return msgspec.structs.replace(facts, chat=decoded)
