from typing import NamedTuple

from stillroom.files import Buffer

SHORT_FIELDS: tuple[str, ...]

class Outline(NamedTuple):
    fields: bytes
    is_conversation: bool
    start: int
    end: int
    num_messages: int
    num_turns: int
    is_open: bool
    has_gym_field: bool

def outline(line: Buffer, /) -> Outline | None: ...
