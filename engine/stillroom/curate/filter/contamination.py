"""Finds rows that contain a prompt of an evaluation file.

- exact: a text of the row is the prompt, word for word.
- contained: a text of the row contains the prompt, word for word.
- near: a text of the row contains, close together and in order, most of the prompt's distinctive
  words, and these are too rare to occur together by chance.

N-grams that many texts share, such as instructions and templates, are boilerplate and do not count
as near: the same template with another value is another task. Words that the prompts of the
evaluation have in common do not count either, because these prompts are different tasks.
"""

import dataclasses
import difflib
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from stillroom.data.checks import Problem
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines
from stillroom.data.words import content_text, user_texts, words_of
from stillroom.errors import DataError

_NGRAM_SIZE = 3
_MIN_MATCHING_SHARE = 0.75
"""The share of a prompt's distinctive words that a row must have to count as near."""
_MIN_MATCHING_SHARE_IN_TEMPLATE = 0.85
"""The same for a prompt with boilerplate, where one other value makes it a different task."""
_MIN_WORDS_CONTAINED = 8
"""A shorter prompt counts only as a whole text: many texts contain short ones such as `Why?`."""
_MIN_WORDS_AS_SENTENCES = 4
"""A prompt with at least this many words also counts if it is one or more whole sentences."""
_MIN_WRAPPER_WORDS = 3
_WRAPPER_SHARE = 0.9
"""Words with which this share of a file's prompts begins or ends are a wrapper."""
_MOSTLY_DISTINCTIVE_SHARE = 0.8
"""A prompt with at least this share of distinctive words counts as free of boilerplate."""
_MOSTLY_DISTINCTIVE_WORDS = 20
"""A prompt with at least this number of distinctive words counts as free of boilerplate, too."""
_MIN_TEXTS_WITH_BOILERPLATE = 4
"""The smallest number of texts that must share an n-gram for it to be boilerplate."""
_EXPECTED_CHANCE_MATCHES = 1
"""The accepted number of rows that have the matching words of some prompt by chance."""
_SHORT_PROMPT_WORDS = 16
"""Prompts with fewer words are judged together: all of them come from templates, or none."""
_MAX_SIMILAR_SHARE = 0.05
"""If a larger share of the short prompts resemble one another, they all come from templates."""
_FEW_TEXTS, _MIN_WORDS_AMONG_FEW = 300, 13
"""With fewer texts, boilerplate looks like distinctive words, so only prompts with at least this
number of words can be near."""
_SENTENCE_END = re.compile(r"[\n.!?:;\"“”«»]+")
_MIN_SHARED_NGRAMS = 0.2
"""Rows that share less of a prompt's distinctive n-grams are ruled out without an alignment."""
_WINDOW_FACTOR = 1.4
"""The length of the part of a text that is compared, relative to the prompt's length."""
_MAX_ALIGNED_WORDS = 400
"""Longer prompts are compared by their n-grams instead of an alignment."""
_MIN_SHARED_NGRAMS_UNALIGNED = 0.55
"""The share of such a prompt's distinctive n-grams that a row must have to count as near."""

Ngram = tuple[str, ...]
ContaminationLevel = Literal["exact", "contained", "near"]
LEVELS: tuple[ContaminationLevel, ...] = get_args(ContaminationLevel)


@dataclass(frozen=True, slots=True)
class EvaluationPrompt:
    """A prompt that must not be trained on: its location as `file:line`, and its words."""

    where: str
    words: tuple[str, ...]
    core: tuple[str, ...] = ()
    """The words without the wrapper that most prompts of the file share; empty if there is none."""


def evaluation_prompts(
    files: Iterable[Path], original_location: Callable[[Path, int], tuple[str, int]], name: str
) -> list[EvaluationPrompt]:
    """Returns the prompts in files of any format: the user's messages of each row.

    `original_location` returns the file and line of a row as results show them, and `name` is what
    errors call the files. Raises DataError if there are no prompts, and for an invalid row:
    skipping it could let its prompt be trained on.
    """
    prompts: list[EvaluationPrompt] = []
    for file in files:
        decode = decode_text_line if file.suffix == ".txt" else decode_line
        for line in read_row_lines(file):
            where = "{}:{}".format(*original_location(file, line.number))
            text = "\n".join(user_texts(_prompt_messages(decode(line), where)))
            prompts.append(EvaluationPrompt(where, tuple(words_of(text))))
    if not prompts:
        raise DataError(
            f"the evaluation file {name} has no prompts",
            "name a file with prompts in decontaminate, or leave this one out",
        )
    return _with_cores(prompts)


def _with_cores(prompts: list[EvaluationPrompt]) -> list[EvaluationPrompt]:
    """Returns the prompts with their core: the words without an instruction that most share."""
    before = _common_start([prompt.words for prompt in prompts])
    after = _common_start([prompt.words[::-1] for prompt in prompts])[::-1]
    if len(before) + len(after) < _MIN_WRAPPER_WORDS:
        return prompts
    return [dataclasses.replace(p, core=_without_wrapper(p.words, before, after)) for p in prompts]


def _without_wrapper(words: Ngram, before: Ngram, after: Ngram) -> Ngram:
    if before and words[: len(before)] == before:
        words = words[len(before) :]
    if after and words[-len(after) :] == after:
        words = words[: -len(after)]
    return words


def _common_start(texts: Sequence[Ngram]) -> Ngram:
    """Returns the words with which most of the texts begin; none for a single text."""
    shared: Ngram = ()
    while len(texts) > 1:
        longer = Counter(text[: len(shared) + 1] for text in texts if len(text) > len(shared))
        [(start, count)] = longer.most_common(1) or [((), 0)]
        if count < max(2, _WRAPPER_SHARE * len(texts)) or start[: len(shared)] != shared:
            break
        shared = start
    return shared


def _prompt_messages(row: dict[str, Any] | Problem, where: str) -> list[Any]:
    """Returns the messages of a row's prompt. Raises DataError for an invalid row."""
    row_format = None if isinstance(row, Problem) else detect_format(row)
    if isinstance(row, Problem) or row_format is None:
        message = row.message if isinstance(row, Problem) else "has no known format"
        raise DataError(f"{where}: the line {message}", 'write e.g. {"prompt": "…"} on each line')
    problem = next(iter(CHECKS[row_format](row)), None)
    if problem is not None:
        raise DataError(f"{where}: {problem.field} {problem.message}", problem.fix)
    match row_format:
        case RowFormat.PROMPTS:
            return list(task_from_row(row).messages)
        case RowFormat.ROLLOUTS:
            return as_rollout(row)["messages"]
        case RowFormat.SFT:
            return row["messages"]
        case RowFormat.DPO:
            return row["prompt"]


@dataclass(frozen=True, slots=True)
class Contamination:
    """The location of the evaluation prompt that a row contains, and how closely they match."""

    where: str
    level: ContaminationLevel


@dataclass(frozen=True, slots=True)
class _DistinctiveParts:
    """The parts of a prompt that are distinctive, that is, not boilerplate."""

    ngrams: frozenset[Ngram]
    bits: tuple[float, ...]
    """The rarity of each word of the prompt, in bits; 0 for boilerplate."""
    is_distinctive: tuple[bool, ...]
    """Whether each word of the prompt is distinctive."""
    num_words: int
    """The number of distinctive words."""

    @property
    def min_matching_words(self) -> float:
        """The least number of the prompt's distinctive words that a near row must have."""
        has_template = (
            self.num_words < _MOSTLY_DISTINCTIVE_SHARE * len(self.is_distinctive)
            and self.num_words < _MOSTLY_DISTINCTIVE_WORDS
        )
        share = _MIN_MATCHING_SHARE_IN_TEMPLATE if has_template else _MIN_MATCHING_SHARE
        return share * self.num_words


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """The n-grams of a training row's prompt, which are counted to find boilerplate."""

    identity: bytes
    """A hash of the prompt's words."""
    ngrams: set[Ngram]
    """The words and n-grams that the row's prompt shares with evaluation prompts."""


class ContaminationIndex:
    """Finds evaluation prompts in rows, ignoring boilerplate.

    First call `count_prompt` for the prompt of every row, then `finish_counting`, which determines
    the boilerplate, and then `find` for each row.
    """

    def __init__(self, prompts: Iterable[EvaluationPrompt]) -> None:
        distinct = {prompt.words: prompt for prompt in prompts if prompt.words}
        self._prompts = list(distinct.values())
        self._num_texts_with = Counter(
            ngram for prompt in self._prompts for ngram in _words_and_ngrams(prompt.words)
        )
        self._counted: set[bytes] = set()
        self._distinctive: list[_DistinctiveParts] = []
        self._prompts_with: dict[Ngram, list[int]] = {}
        self._prompts_by_words: dict[Ngram, int] = {}
        """The index of each prompt, by all of its words and by the words of its core."""
        self._words_by_rarest_ngram: dict[Ngram, list[Ngram]] = {}
        """The keys of `_prompts_by_words` that longer texts may contain, by their rarest n-gram."""
        self._min_bits = 0.0

    @staticmethod
    def of_texts(texts: Mapping[str, str]) -> "ContaminationIndex":
        """Returns an index that finds texts word for word, and names them by their keys."""
        prompts = [EvaluationPrompt(name, tuple(words_of(text))) for name, text in texts.items()]
        index = ContaminationIndex(_with_cores(prompts))
        index.finish_counting()
        return index

    def count_prompt(self, text: str) -> CountedPrompt | None:
        """Counts the words and n-grams of a row's prompt, and returns what it has counted.

        Returns None if an equal prompt was counted before.
        """
        words = words_of(text)
        spaced = " ".join(words).encode("utf-8", errors="surrogatepass")
        identity = hashlib.blake2b(spaced, digest_size=16).digest()
        if identity in self._counted:
            return None
        counted = CountedPrompt(identity, _words_and_ngrams(words) & self._num_texts_with.keys())
        self.add_counted(counted)
        return counted

    def add_counted(self, counted: CountedPrompt) -> None:
        """Adds a prompt that another index has counted, unless it was counted here before."""
        if counted.identity not in self._counted:
            self._counted.add(counted.identity)
            self._num_texts_with.update(counted.ngrams)

    def finish_counting(self) -> None:
        """Determines the distinctive words of each prompt; no prompt can be counted after this."""
        num_texts = len(self._prompts) + len(self._counted)
        self._min_bits = math.log2(
            max(1, num_texts * len(self._prompts)) / _EXPECTED_CHANCE_MATCHES
        )
        min_boilerplate_texts = max(
            _MIN_TEXTS_WITH_BOILERPLATE, min(20, num_texts / 2), 0.02 * num_texts
        )
        prompts_with: defaultdict[Ngram, list[int]] = defaultdict(list)
        words_by_rarest_ngram: defaultdict[Ngram, list[Ngram]] = defaultdict(list)
        for number, prompt in enumerate(self._prompts):
            distinctive = self._find_distinctive(prompt.words, min_boilerplate_texts, num_texts)
            self._distinctive.append(distinctive)
            for words in filter(None, (prompt.words, prompt.core)):
                if self._prompts_by_words.setdefault(words, number) == number and (
                    len(words) >= _MIN_WORDS_CONTAINED
                ):
                    words_by_rarest_ngram[self._rarest_ngram(words)].append(words)
            has_few_texts = num_texts < _FEW_TEXTS
            min_words = _MIN_WORDS_AMONG_FEW if has_few_texts else _MIN_WORDS_CONTAINED
            if len(prompt.words) >= min_words and sum(distinctive.bits) >= self._min_bits:
                for ngram in distinctive.ngrams:
                    prompts_with[ngram].append(number)
        self._prompts_with = dict(prompts_with)
        self._words_by_rarest_ngram = dict(words_by_rarest_ngram)
        self._exclude_templates()

    def _exclude_templates(self) -> None:
        """Excludes prompts that resemble one another from being matched as near.

        The prompts of an evaluation are different tasks. Where one is near another, a word or two
        make a different task. If this is so for some of the short prompts, they come from
        templates, and all short prompts are excluded.
        """
        similar = set[int]()
        for number, prompt in enumerate(self._prompts):
            near = self._find_near(list(prompt.words), exclude=number)
            if near is not None:
                similar |= {number, near}
        lengths = [len(prompt.words) for prompt in self._prompts]
        short = [n for n, length in enumerate(lengths) if length < _SHORT_PROMPT_WORDS]
        if len(similar.intersection(short)) > _MAX_SIMILAR_SHARE * len(short):
            similar.update(short)
        if similar:
            others = {ngram: [n for n in numbers if n not in similar]
                       for ngram, numbers in self._prompts_with.items()}  # fmt: skip
            self._prompts_with = {ngram: numbers for ngram, numbers in others.items() if numbers}

    def find_in(self, messages: Sequence[dict[str, Any]], *, near: bool) -> Contamination | None:
        """Returns what `find` does for the texts of the user and the assistant in a conversation.

        The user's messages are searched both one by one and joined. System messages are left out
        because many rows share them, and tool results because neither user nor assistant wrote
        them.
        """
        texts = user_texts(messages)
        answers = [content_text(m.get("content")) for m in messages if m.get("role") == "assistant"]
        own = dict.fromkeys(filter(None, ["\n".join(texts), *texts]))
        return self.find(own, dict.fromkeys(filter(None, answers)), near=near)

    def find(
        self, user_texts: Iterable[str], other_texts: Iterable[str] = (), *, near: bool = True
    ) -> Contamination | None:
        """Returns the evaluation prompt that one of a row's texts contains; None if there is none.

        Of several prompts, it returns the closest match. With `near=False`, a row must contain a
        prompt word for word.
        """
        found_by_level: dict[ContaminationLevel, int] = {}
        texts = [(text, True) for text in user_texts] + [(text, False) for text in other_texts]
        for text, is_user in texts:
            words = words_of(text)
            if (number := self._prompts_by_words.get(tuple(words))) is not None:
                return Contamination(self._prompts[number].where, "exact")
            if "contained" not in found_by_level:
                number = self._find_contained(words)
                if number is None and is_user:
                    number = self._find_in_sentences(text)
                if number is not None:
                    found_by_level["contained"] = number
            if near and not found_by_level and (number := self._find_near(words)) is not None:
                found_by_level["near"] = number
        for level in LEVELS:
            if level in found_by_level:
                return Contamination(self._prompts[found_by_level[level]].where, level)
        return None

    def _find_distinctive(
        self, words: tuple[str, ...], min_boilerplate_texts: float, num_texts: int
    ) -> _DistinctiveParts:
        """Returns the parts of a prompt outside the n-grams that many texts share.

        If all of its n-grams are about equally frequent, texts repeat the whole prompt, and none of
        it is boilerplate.
        """
        ngrams = list(_ngrams(words))
        counts = [self._num_texts_with[ngram] for ngram in ngrams]
        min_count = max(min_boilerplate_texts, 2 * (min(counts) + 1))
        is_shared = [count >= min_count for count in counts]
        # N-grams next to shared ones overlap the boilerplate, so their counts say nothing.
        inner = [
            count
            for start, count in enumerate(counts)
            if not any(is_shared[max(0, start - _NGRAM_SIZE + 1) : start + _NGRAM_SIZE])
        ]
        if inner:
            inner_min_count = max(_MIN_TEXTS_WITH_BOILERPLATE, 3 * (min(inner) + 1))
            is_shared = [count >= min(min_count, inner_min_count) for count in counts]
        is_distinctive = [True] * len(words)
        for start, ngram in enumerate(ngrams):
            if is_shared[start]:
                is_distinctive[start : start + _NGRAM_SIZE] = [False] * len(ngram)
        bits = [
            math.log2(num_texts / self._num_texts_with[(word,)]) if is_word_distinctive else 0.0
            for word, is_word_distinctive in zip(words, is_distinctive, strict=True)
        ]
        distinctive_ngrams = frozenset(
            ngram for ngram, shared in zip(ngrams, is_shared, strict=True) if not shared
        )
        return _DistinctiveParts(
            distinctive_ngrams, tuple(bits), tuple(is_distinctive), sum(is_distinctive)
        )

    def _rarest_ngram(self, words: tuple[str, ...]) -> Ngram:
        """Returns the rarest n-gram of a prompt, by which the prompt is looked up."""
        return min(_ngrams(words), key=lambda ngram: self._num_texts_with[ngram])

    def _find_contained(self, words: list[str]) -> int | None:
        """Returns the index of a prompt that a text contains; None if there is none."""
        matching_ngrams = self._words_by_rarest_ngram.keys() & set(_ngrams(words))
        if not matching_ngrams:
            return None
        spaced = f" {' '.join(words)} "
        contained = (
            self._prompts_by_words[prompt]
            for ngram in matching_ngrams
            for prompt in self._words_by_rarest_ngram[ngram]
            if f" {' '.join(prompt)} " in spaced
        )
        return min(contained, default=None)

    def _find_in_sentences(self, text: str) -> int | None:
        """Returns the index of a short prompt that is one or more whole sentences of a text."""
        sentences = [words for part in _SENTENCE_END.split(text) if (words := words_of(part))]
        for start in range(len(sentences)):
            joined: Ngram = ()
            for sentence in sentences[start:]:
                joined += tuple(sentence)
                if len(joined) >= _MIN_WORDS_CONTAINED:
                    break
                if len(joined) >= _MIN_WORDS_AS_SENTENCES and joined in self._prompts_by_words:
                    return self._prompts_by_words[joined]
        return None

    def _find_near(self, words: list[str], exclude: int | None = None) -> int | None:
        """Returns the index of a prompt that a text is near, other than the prompt `exclude`."""
        matching_ngrams = self._prompts_with.keys() & set(_ngrams(words))
        if not matching_ngrams:
            return None
        counts = Counter(
            number for ngram in matching_ngrams for number in self._prompts_with[ngram]
        )
        candidates = [
            number
            # most_common would keep equal counts in the order of the set `matching_ngrams`, which
            # differs from process to process.
            for number, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            if count >= _MIN_SHARED_NGRAMS * len(self._distinctive[number].ngrams)
            and number != exclude
        ]
        near = (number for number in candidates if self._is_near(number, words, matching_ngrams))
        return next(near, None)

    def _is_near(self, number: int, words: list[str], matching_ngrams: set[Ngram]) -> bool:
        """Returns whether a text contains most of the distinctive words of a prompt."""
        prompt, distinctive = self._prompts[number].words, self._distinctive[number]
        length = round(len(prompt) * _WINDOW_FACTOR) + _NGRAM_SIZE
        window = _densest_window(words, distinctive.ngrams & matching_ngrams, length)
        if len(prompt) > _MAX_ALIGNED_WORDS:
            # Alignment takes quadratic time; for this many words, n-grams are reliable enough.
            shared = distinctive.ngrams & set(_ngrams(window))
            return len(shared) >= _MIN_SHARED_NGRAMS_UNALIGNED * len(distinctive.ngrams)
        matcher = difflib.SequenceMatcher(None, prompt, window, autojunk=False)
        blocks = matcher.get_matching_blocks()
        matched = sum(sum(distinctive.is_distinctive[b.a : b.a + b.size]) for b in blocks)
        bits = sum(sum(distinctive.bits[b.a : b.a + b.size]) for b in blocks)
        return matched >= distinctive.min_matching_words and bits >= self._min_bits


def _ngrams(words: Sequence[str]) -> Iterator[Ngram]:
    """Returns the trigrams of a text, in order; fewer than three words make a single n-gram."""
    if len(words) < _NGRAM_SIZE:
        return iter((tuple(words),) if words else ())
    return zip(words, words[1:], words[2:], strict=False)


def _words_and_ngrams(words: Sequence[str]) -> set[Ngram]:
    """Returns the unigrams and trigrams of a text."""
    return {(word,) for word in words} | set(_ngrams(words))


def _densest_window(
    words: list[str], ngrams: frozenset[Ngram] | set[Ngram], length: int
) -> list[str]:
    """Returns the part of a text with the most of the given n-grams.

    It starts a quarter of `length` before one of them, and ends `length` words after its start.
    """
    starts = [start for start, ngram in enumerate(_ngrams(words)) if ngram in ngrams]
    best_start, best_count, end = 0, 0, 0
    for index, start in enumerate(starts):
        while end < len(starts) and starts[end] < start + length:
            end += 1
        if end - index > best_count:
            best_start, best_count = start, end - index
    # The prompt's first words may be among the changed ones.
    begin = max(0, best_start - length // 4)
    return words[begin : best_start + length]
