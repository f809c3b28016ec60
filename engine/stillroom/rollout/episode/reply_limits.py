"""How much of a tool's reply a model gets to read; what is cut is marked, so that it knows."""

from collections.abc import Callable
from typing import Any

CutText = Callable[[str], str]
"""Returns a reply as the model reads it."""


def cut_at_characters(most: int) -> CutText:
    """Returns a cut after so many characters."""

    def cut(text: str) -> str:
        if len(text) <= most:
            return text
        return f"{text[:most]}\n[cut: {most} of {len(text)} characters are shown]"

    return cut


def cut_at_tokens(tokenizer: Any, most: int) -> CutText:
    """Returns a cut after so many tokens of a fast transformers tokenizer."""

    def cut(text: str) -> str:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends: list[tuple[int, int]] = encoded["offset_mapping"]
        if len(ends) <= most:
            return text
        return f"{text[: ends[most - 1][1]]}\n[cut: {most} of {len(ends)} tokens are shown]"

    return cut
