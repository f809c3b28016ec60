"""Detects the natural language that a text is written in."""

import re
from typing import Any

from stillroom.errors import InputError, missing_extra
from stillroom.validation import nearest

# Code, links and markup would outweigh the words around them in the detection.
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|https?://\S+|<[^<>\n]{1,200}>", re.DOTALL)
_MOST_CHARACTERS = 4000
# fmt: off
LANGUAGES = (
    "am", "ar", "az", "be", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu",
    "fa", "fi", "fr", "gu", "he", "hi", "hr", "hu", "hy", "is", "it", "ja", "ka", "kn", "ko",
    "ku", "lo", "lt", "lv", "ml", "mr", "ms", "nl", "no", "or", "pa", "pl", "pt", "ro", "ru",
    "sk", "sl", "sq", "sr", "sv", "ta", "te", "th", "tl", "tr", "uk", "ur", "vi", "yo", "zh",
)
# fmt: on


class LanguageDetector:
    """Detects which of 60 languages, given as ISO 639-1 codes, a text is in, by letter sequences.

    The constructor raises MissingExtraError if the library is not installed, and InputError if the
    `wanted` language is not one of the 60.
    """

    def __init__(self, wanted: str) -> None:
        try:
            import eld
        except ModuleNotFoundError as error:
            raise missing_extra("curate", "telling languages") from error
        if wanted not in LANGUAGES:
            raise InputError(
                f"language {wanted!r} is not known{nearest(wanted, LANGUAGES)}",
                f"give the code of a language: {', '.join(LANGUAGES)}",
            )
        self._detector: Any = eld.LanguageDetector()

    def language_of(self, text: str) -> str | None:
        """Returns the code of a text's language; None if the text has too few words to decide.

        Only the first 4000 characters are considered.
        """
        prose = _CODE.sub(" ", text[:_MOST_CHARACTERS])
        if not any(map(str.isalpha, prose)):
            return None
        return self._detector.detect(prose).language
