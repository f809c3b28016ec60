"""Recognises prompts made from templates, and rewords prompts.

The form of a text is the template of its most distinctive sentence. So tickets with one complaint
have one form, whatever greeting and closing are around it. Templates are inferred: sentences of one
template share most of their words, weighted by their rarity; the other words are fillings.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from random import Random

from stillroom.data.words import words_of

_QUOTED = (
    r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”|\u2018[^’\n]*’|«[^»\n]*»"
    r"|(?<!\w)'(?:[^'\n]|(?<=\w)'(?=\w))+'(?!\w)"
)
_LITERAL = r"(?<!\S)\S*[\d@_/\\<>{}\[\]|=$%#*~^]\S*"
"""Numbers, ids, emails, URLs, paths and markup, with the punctuation that touches them."""
_TITLE = r"(?<=[a-z,] )[A-Z]\w+(?: (?:of |the |and )*[A-Z]\w+)+"
"""Names and titles of several words; not at the start of a sentence, nor in one that has only
capitalised words."""
_FILLING = re.compile(f"{_QUOTED}|{_LITERAL}|{_TITLE}", re.DOTALL)
_PROTECTED = re.compile(rf"({_QUOTED}|{_LITERAL}|\b\w*[A-Z]{{2}}\w*|\b[B-HJ-Z]\b)", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|\n+")
_OPENING = re.compile(r"\s*[^\W\d_]+(?: [^\W\d_]+){0,2}[,!] ")
"""A greeting of at most three words."""

_PLACEHOLDER = "_"
"""Stands for a filling in a sentence's words."""
_FILLING_WEIGHT = 1.0
_MIN_ALIKE = 0.6
"""The least share of the weight of two sentences' words that sentences of one template share."""
_MIN_FIXED = 1 / 3
"""The least share of words other than fillings in a sentence that may be from a template."""
_MAX_CANDIDATES = 100
"""The maximum number of templates with a shared word with which a sentence is compared."""
_MAX_FREE = 0.6
"""A text with more than this share of its words in sentences of no template has its own form."""
_MIN_FORMS = 5


def forms_of(texts: Sequence[str]) -> list[int]:
    """Returns the form of each text, numbered from 0 by first appearance.

    Texts of one template have one form, whatever their fillings and the sentences around them. A
    text that follows no template has its own form, which it shares with its copies only.
    """
    sentences = [_sentences_of(text) for text in texts]
    num_texts_with = Counter(word for text in sentences for word in {w for s in text for w in s})
    grouping = _Templates(num_texts_with, len(texts))
    templates = [[grouping.template_of(sentence) for sentence in text] for text in sentences]
    uses = _uses_of(templates, sentences)
    keys = [
        _form_key(text_templates, text_sentences, uses, len(texts))
        for text_templates, text_sentences in zip(templates, sentences, strict=True)
    ]
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def held_out_forms(forms: Sequence[int], *, share: float, rng: Random) -> set[int]:
    """Returns forms that together hold about `share` of the texts, at most 1.5 times as many.

    forms: the form of each text. The set is empty if there are fewer than five forms, if no form
    has two texts, or if each form is too large.
    """
    sizes = Counter(forms)
    if len(sizes) < _MIN_FORMS or max(sizes.values()) < 2:
        return set()
    wanted, num_texts = share * len(forms), 0
    held_out = set[int]()
    for form in rng.sample(sorted(sizes), len(sizes)):
        total = num_texts + sizes[form]
        is_nearer = total - wanted <= wanted - num_texts
        if is_nearer and total <= 1.5 * wanted:
            held_out.add(form)
            num_texts = total
    return held_out


def _sentences_of(text: str) -> list[tuple[str, ...]]:
    """Returns the words of each sentence, without the greeting and with fillings masked."""
    masked = _FILLING.sub(_mask, text)
    greeting = _OPENING.match(masked)
    if greeting and greeting.end() < len(masked.rstrip()):
        masked = masked[greeting.end() :]
    sentences = [tuple(words_of(sentence)) for sentence in _SENTENCE_END.split(masked)]
    return [sentence for sentence in sentences if sentence]


def _mask(filling: re.Match[str]) -> str:
    """Returns the placeholder and the filling's last punctuation, which may end a sentence."""
    last = filling[0][-1]
    return f" {_PLACEHOLDER}{last if last in '.!?;:,' else ''}"


class _Templates:
    """Groups similar sentences: a template is the first sentence and those that resemble it."""

    def __init__(self, num_texts_with: Counter[str], num_texts: int) -> None:
        self._num_texts_with = num_texts_with
        self._num_texts = num_texts
        self._numbers: dict[tuple[str, ...], int] = {}
        self._weights: list[dict[str, float]] = []
        """The words of each template's first sentence, with their weights."""
        self._templates_with = defaultdict[str, list[int]](list)

    def template_of(self, sentence: tuple[str, ...]) -> int:
        """Returns the number of a sentence's template."""
        # A word that no other text has is a filling; several in a row are one filling.
        pattern: list[str] = []
        for word in sentence:
            part = word if self._num_texts_with[word] > 1 else _PLACEHOLDER
            if part != _PLACEHOLDER or pattern[-1:] != [_PLACEHOLDER]:
                pattern.append(part)
        num_fixed = len(pattern) - pattern.count(_PLACEHOLDER)
        if num_fixed < _MIN_FIXED * len(sentence):
            # Too few fixed words: only copies of the sentence share its template.
            return self._numbers.setdefault(sentence, -1 - len(self._numbers))
        key = tuple(pattern)
        if key not in self._numbers:
            self._numbers[key] = self._similar_or_new(key)
        return self._numbers[key]

    def _similar_or_new(self, pattern: tuple[str, ...]) -> int:
        """Returns the most similar template, or a new one if none is similar enough."""
        weights = {word: self._weight(word) for word in pattern}
        words = _distinctive_words(weights)
        candidates = {
            template for word in words for template in self._templates_with[word][:_MAX_CANDIDATES]
        }
        alike = {template: _similarity(weights, self._weights[template]) for template in candidates}
        best = max(alike, key=lambda template: (alike[template], -template), default=None)
        if best is not None and alike[best] >= _MIN_ALIKE:
            return best
        self._weights.append(weights)
        for word in words:
            self._templates_with[word].append(len(self._weights) - 1)
        return len(self._weights) - 1

    def _weight(self, word: str) -> float:
        if word == _PLACEHOLDER:
            return _FILLING_WEIGHT
        return log(1 + self._num_texts / self._num_texts_with[word])


def _distinctive_words(weights: dict[str, float]) -> list[str]:
    """Returns the heaviest words of a sentence: similar sentences share at least one of them.

    Source: the prefix filter of Chaudhuri, Ganti and Kaushik (2006). The other words together weigh
    less than similar sentences must share.
    """
    distinctive: list[str] = []
    remaining = sum(weights.values())
    min_shared = _MIN_ALIKE * remaining
    for word in sorted(weights.keys() - {_PLACEHOLDER}, key=lambda word: (-weights[word], word)):
        if remaining < min_shared:
            break
        distinctive.append(word)
        remaining -= weights[word]
    return distinctive


def _similarity(one: dict[str, float], other: dict[str, float]) -> float:
    shared = sum(weight for word, weight in one.items() if word in other)
    return shared / max(sum(one.values()), sum(other.values()))


@dataclass(slots=True)
class _Use:
    """How the texts use a template."""

    num_texts: int
    num_wordings: int
    """The number of different sentences; fillings count only as far as their words differ."""


def _uses_of(
    templates: Sequence[Sequence[int]], sentences: Sequence[Sequence[tuple[str, ...]]]
) -> dict[int, _Use]:
    num_texts = Counter(template for text in templates for template in set(text))
    wordings = defaultdict[int, set[tuple[str, ...]]](set)
    for text_templates, text_sentences in zip(templates, sentences, strict=True):
        for template, sentence in zip(text_templates, text_sentences, strict=True):
            wordings[template].add(sentence)
    return {t: _Use(count, len(wordings[t])) for t, count in num_texts.items()}


def _form_key(
    templates: Sequence[int],
    sentences: Sequence[tuple[str, ...]],
    uses: dict[int, _Use],
    num_texts: int,
) -> object:
    """Returns the most distinctive template of a text; the text's words if it has none."""
    shared = [
        (template, sentence)
        for template, sentence in zip(templates, sentences, strict=True)
        if uses[template].num_texts > 1
    ]
    num_words = sum(map(len, sentences))
    num_free = num_words - sum(len(sentence) for _, sentence in shared)
    if not shared or num_free > _MAX_FREE * num_words:
        return tuple(sentences)

    def distinctiveness(template_and_sentence: tuple[int, tuple[str, ...]]) -> float:
        """Is higher for rare, long sentences with fillings than for greetings and closings."""
        template, sentence = template_and_sentence
        use = uses[template]
        has_fillings = _PLACEHOLDER in sentence or use.num_wordings > 1
        return log(num_texts / use.num_texts) + 0.5 * log(len(sentence)) + has_fillings

    return max(shared, key=distinctiveness)[0]


_GREETINGS = ("Hello, ", "Hi, ", "Hi there, ", "Good day, ", "Hello! ", "Hey, ")
_FRAMES = (
    "A request: ",
    "Here is one: ",
    "Could you look at this? ",
    "Next one: ",
    "Please see to this: ",
)
_CLOSINGS = (" Thanks.", " Thank you!", " Thanks in advance.", " Many thanks.", " Cheers.")
_CONTRACTIONS = {
    "do not": "don't", "does not": "doesn't", "did not": "didn't", "is not": "isn't",
    "are not": "aren't", "was not": "wasn't", "cannot": "can't", "can not": "can't",
    "will not": "won't", "would not": "wouldn't", "should not": "shouldn't",
    "have not": "haven't", "has not": "hasn't", "I am": "I'm", "I would": "I'd",
    "I will": "I'll", "it is": "it's", "that is": "that's", "what is": "what's",
}  # fmt: skip
_CONTRACTED = re.compile(rf"\b({'|'.join(_CONTRACTIONS)})(?= +[a-z])", re.IGNORECASE)
_ENGLISH = frozenset(
    ("a", "an", "and", "are", "for", "i", "in", "is", "it", "my", "of", "on", "please", "the",
     "this", "to", "what", "you")
)  # fmt: skip
_GREETS = re.compile(
    r"\s*(?:hello|hi|hey|dear|good (?:day|morning|evening|afternoon))\b", re.IGNORECASE
)
_CLOSES = re.compile(
    r"\b(?:thanks|thank you|cheers|regards|wishes)\b[^.!?\n]*[.!?]?\s*$", re.IGNORECASE
)
_TYPO_WORD = re.compile(r"(?<![\w'’-])[a-z]{7,}(?![\w'’-])")
_STRUCTURED = re.compile(r"[{\[<]|.*(?:```|\n)", re.DOTALL)
_SENTENCE_BEGINNING = re.compile(r"(?:\A|(?<=[.!?,] ))[A-Z][a-z]*\b")
_BEGINNINGS = frozenset((
    "a", "after", "all", "an", "and", "answer", "are", "as", "at", "before", "but", "can",
    "choose", "classify", "compute", "could", "describe", "do", "does", "explain", "extract",
    "find", "for", "from", "give", "good", "hello", "here", "hi", "how", "i", "if", "in", "is",
    "it", "list", "make", "my", "no", "nothing", "of", "on", "our", "please", "return", "say",
    "show", "since", "so", "solve", "sort", "summarise", "summarize", "tell", "thanks", "that",
    "the", "there", "they", "this", "to", "translate", "use", "we", "what", "when", "where",
    "which", "who", "why", "with", "would", "write", "yes", "you", "your",
))  # fmt: skip


def reword(text: str, rng: Random) -> str:
    """Returns a rewording of the text with the same meaning; `rng` alone decides which.

    One to three changes are drawn: a greeting, an introduction or a closing (English texts of one
    paragraph only), a common word in lower case at the beginning of a sentence, no full stop at the
    end, a typo or two in long words, contractions, single spaces. Numbers, ids, emails, URLs, names
    and words in capitals stay, and so does quoted text. A text that no change fits is returned
    unchanged.
    """
    changes = rng.sample(_CHANGES, len(_CHANGES))
    wanted = rng.randint(1, 3)
    reworded, num_changes = text, 0
    for change in changes:
        changed = change(reworded, rng)
        if changed != reworded:
            reworded, num_changes = changed, num_changes + 1
        if num_changes == wanted:
            break
    return reworded


def _change_prose(text: str, change: Callable[[str], str]) -> str:
    """Returns the text with the change made outside of quotes, literals and capitals."""
    pieces = _PROTECTED.split(text)
    return "".join(change(p) if number % 2 == 0 else p for number, p in enumerate(pieces) if p)


def _is_english_prose(text: str) -> bool:
    return not _STRUCTURED.match(text.strip()) and not _ENGLISH.isdisjoint(words_of(text))


def _add_opening(text: str, rng: Random) -> str:
    openings = rng.choice((_GREETINGS, _FRAMES))
    if (
        not _is_english_prose(text)
        or _GREETS.match(text)
        or text.startswith((*_GREETINGS, *_FRAMES))
    ):
        return text
    return rng.choice(openings) + text.lstrip()


def _add_closing(text: str, rng: Random) -> str:
    closing = rng.choice(_CLOSINGS)
    if not _is_english_prose(text) or _CLOSES.search(text) or text.rstrip()[-1] not in ".!?":
        return text
    return text.rstrip() + closing


def _lower_beginnings(text: str, rng: Random) -> str:
    """Lowers the first letter of sentences that begin with a common word, not with a name."""

    def lower(match: re.Match[str]) -> str:
        return match[0].lower() if match[0].lower() in _BEGINNINGS else match[0]

    return _change_prose(text, lambda piece: _SENTENCE_BEGINNING.sub(lower, piece))


def _drop_full_stop(text: str, rng: Random) -> str:
    ending = re.search(r"(?<=[a-z])[.!?]\s*$", text)
    return text[: ending.start()] if ending and _PROTECTED.split(text)[-1].strip() else text


def _add_typos(text: str, rng: Random) -> str:
    """Swaps two inner letters of one or two long words in lower case."""
    candidates: list[str] = []
    _change_prose(text, lambda piece: candidates.extend(_TYPO_WORD.findall(piece)) or piece)
    words = sorted(set(candidates))
    chosen = {
        word: _swap(word, rng) for word in rng.sample(words, min(len(words), rng.randint(1, 2)))
    }
    return _change_prose(
        text, lambda piece: _TYPO_WORD.sub(lambda w: chosen.get(w[0], w[0]), piece)
    )


def _swap(word: str, rng: Random) -> str:
    at = rng.randint(1, len(word) - 3)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _contract(text: str, rng: Random) -> str:
    def contracted(match: re.Match[str]) -> str:
        words = next(v for k, v in _CONTRACTIONS.items() if k.lower() == match[0].lower())
        return match[0][0] + words[1:]

    return _change_prose(text, lambda piece: _CONTRACTED.sub(contracted, piece))


def _single_spaces(text: str, rng: Random) -> str:
    return _change_prose(text, lambda piece: re.sub(r"(?<=\S) {2,}(?=\S)", " ", piece))


_CHANGES: tuple[Callable[[str, Random], str], ...] = (
    _add_opening,
    _add_closing,
    _lower_beginnings,
    _drop_full_stop,
    _add_typos,
    _contract,
    _single_spaces,
)
