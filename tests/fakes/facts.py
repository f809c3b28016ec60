"""Facts that can be compared, however they were read."""

import msgspec

from stillroom.curate.facts import RolloutFacts


def in_full(facts: RolloutFacts | None) -> RolloutFacts | None:
    """The facts with their messages decoded."""
    return facts and msgspec.structs.replace(facts, given=facts.messages)
