from typing import NamedTuple

from stillroom.files import Buffer

VERSION: int
SHORT_FIELDS: tuple[str, ...]

class Outline(NamedTuple):
    fields: bytes
    is_conversation: bool
    start: int
    end: int
    last_start: int
    last_end: int
    num_turns: int
    is_open: bool
    has_gym_field: bool

def outline(line: Buffer, /) -> Outline | None: ...
