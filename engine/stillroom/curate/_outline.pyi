from stillroom.curate.outline import Outline
from stillroom.files import Buffer

SHORT_FIELDS: tuple[str, ...]

def outline(line: Buffer, /) -> Outline | None: ...
