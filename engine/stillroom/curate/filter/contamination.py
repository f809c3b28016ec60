"""Finds rows that hold a prompt of an evaluation file: as it is, inside a text, or changed.

- exact: a text of the row has the prompt's words, no more and no less.
- contained: a text of the row has the prompt's words one after the other, among others.
- near: it has, close together and in order, most of the words by which the prompt differs from
  other texts, and these are too rare to have met by chance.

Words in runs that many texts share (instructions, templates) are boilerplate and do not count as
near: a task of the same template with another value is another task. Neither do words that the
evaluation's own prompts, which are different tasks, have in common with one another.
"""

import dataclasses
import difflib
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from stillroom.data.checks import Problem
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import decode_line, decode_text_line, read_row_lines
from stillroom.data.words import user_texts, words_of
from stillroom.errors import DataError

RUN = 3
_LEAST_OWN_SHARE = 0.75
"""The share of a prompt's distinctive words that a row must have to hold the prompt."""
_LEAST_TEMPLATE_SHARE = 0.85
"""The same share for a prompt with boilerplate, where one value of six makes another task."""
_LEAST_WORDS_EMBEDDED = 8
"""A shorter prompt counts only as a whole text: short ones like `Why?` are part of many texts."""
_LEAST_WORDS_OF_SENTENCES = 4
"""A prompt shorter than that is not looked for among a text's sentences, and one this long is."""
_LEAST_WRAPPER = 3
_MOST = 0.9
"""Words before and behind the prompts that this share of a file's prompts have are a wrapper."""
_FREE_SHARE = 0.8
"""A prompt with at least this share of distinctive words counts as free of boilerplate."""
_FREE_WORDS = 20
"""A prompt with this many distinctive words counts as free, too."""
_LEAST_SHARED = 4
"""The least number of texts with a run of a template."""
_CHANCE = 1
"""How many rows may have the matching words of some prompt by chance."""
_SHORT = 16
"""Prompts of fewer words are judged together: whether they are tasks of one template."""
_ALIKE_SHARE = 0.05
_FEW_TEXTS, _LEAST_WORDS_AMONG_FEW = 300, 13
"""Among fewer texts the words of a template cannot be distinguished from a prompt's own, so that a
prompt of fewer words is not looked for with changes."""
_SENTENCE_END = re.compile(r"[\n.!?:;\"“”«»]+")
_LEAST_SHARED_RUNS = 0.2
"""Rows that share less of a prompt's distinctive runs are ruled out without an alignment."""
_WINDOW = 1.4
"""The length of the part of a text that is compared, relative to the prompt's length."""
_LONGEST_ALIGNED = 400
"""Longer prompts (in words) are compared by their runs instead of an alignment."""
_LEAST_RUNS_OF_LONG = 0.55
"""The share of a long prompt's distinctive runs that a row must have to hold it."""

Run = tuple[str, ...]
ContaminationLevel = Literal["exact", "contained", "near"]
LEVELS: tuple[ContaminationLevel, ...] = get_args(ContaminationLevel)


@dataclass(frozen=True, slots=True)
class EvaluationPrompt:
    """The words of a prompt that must not be trained on, and its place as `file:line`."""

    where: str
    words: tuple[str, ...]
    core: tuple[str, ...] = ()
    """The words without those that wrap most prompts of the file; empty if there are none."""


def evaluation_prompts(
    files: Iterable[Path], place: Callable[[Path, int], tuple[str, int]], name: str
) -> list[EvaluationPrompt]:
    """Returns the prompts in files of any format: the user's messages of each row.

    `place` returns the file and the line that stand for a row in results. Raises DataError for a
    row that has a problem, as skipping its prompt could let it be trained on, and if there are no
    prompts, with the `name` of the files.
    """
    prompts: list[EvaluationPrompt] = []
    for file in files:
        decode = decode_text_line if file.suffix == ".txt" else decode_line
        for line in read_row_lines(file):
            where = "{}:{}".format(*place(file, line.number))
            text = "\n".join(user_texts(_messages(decode(line), where)))
            prompts.append(EvaluationPrompt(where, tuple(words_of(text))))
    if not prompts:
        raise DataError(f"the evaluation file {name} holds no prompts", "give another one")
    return _with_cores(prompts)


def _with_cores(prompts: list[EvaluationPrompt]) -> list[EvaluationPrompt]:
    """Returns the prompts with their cores, e.g. without an instruction that all of them have."""
    before = _most_share([prompt.words for prompt in prompts])
    behind = _most_share([prompt.words[::-1] for prompt in prompts])[::-1]
    if len(before) + len(behind) < _LEAST_WRAPPER:
        return prompts
    return [dataclasses.replace(p, core=_core(p.words, before, behind)) for p in prompts]


def _core(words: Run, before: Run, behind: Run) -> Run:
    if before and words[: len(before)] == before:
        words = words[len(before) :]
    if behind and words[-len(behind) :] == behind:
        words = words[: -len(behind)]
    return words


def _most_share(texts: Sequence[Run]) -> Run:
    """Returns the words with which most of the texts begin; none of a single text."""
    shared: Run = ()
    while len(texts) > 1:
        longer = Counter(text[: len(shared) + 1] for text in texts if len(text) > len(shared))
        [(start, count)] = longer.most_common(1) or [((), 0)]
        if count < max(2, _MOST * len(texts)) or start[: len(shared)] != shared:
            break
        shared = start
    return shared


def _messages(row: dict[str, Any] | Problem, where: str) -> list[Any]:
    row_format = None if isinstance(row, Problem) else detect_format(row)
    if isinstance(row, Problem) or row_format is None:
        message = row.message if isinstance(row, Problem) else "is of no known format"
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
    """The place of the evaluation prompt that a row holds, and how closely it holds it."""

    where: str
    level: ContaminationLevel


@dataclass(frozen=True, slots=True)
class _Distinctive:
    """The parts of a prompt that are distinctive, that is, not boilerplate."""

    runs: frozenset[Run]
    bits: tuple[float, ...]
    """How rare each word of the prompt is, in bits; 0 for boilerplate."""
    is_distinctive: tuple[bool, ...]
    """Whether the word is distinctive, for each word of the prompt."""
    num_words: int

    @property
    def min_matching_words(self) -> float:
        """How many of the prompt's distinctive words a contaminated row has at least."""
        is_free = (
            self.num_words >= _FREE_SHARE * len(self.is_distinctive)
            or self.num_words >= _FREE_WORDS
        )
        return (_LEAST_OWN_SHARE if is_free else _LEAST_TEMPLATE_SHARE) * self.num_words


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """What the prompt of a training row adds to the counts by which boilerplate is found."""

    identity: bytes
    runs: set[Run]
    """The words and the runs of words in the row's prompt that evaluation prompts have as well."""


class ContaminationIndex:
    """Finds evaluation prompts in rows, after it has learned which of their words are boilerplate.

    First call `count_prompt` for the prompt of every row, then `close`, which ends the counting,
    and then `find` for each row.
    """

    def __init__(self, prompts: Iterable[EvaluationPrompt]) -> None:
        distinct = {prompt.words: prompt for prompt in prompts if prompt.words}
        self._prompts = list(distinct.values())
        self._num_texts_with = Counter(
            run for prompt in self._prompts for run in _words_and_runs(prompt.words)
        )
        self._seen: set[bytes] = set()
        self._distinctive: list[_Distinctive] = []
        self._prompts_with: dict[Run, list[int]] = {}
        self._whole: dict[Run, int] = {}
        """The prompts by all of their words, and by those of their core."""
        self._starting: dict[Run, list[Run]] = {}
        """The keys of `_whole` that are looked for in longer texts, by their rarest run."""
        self._least_bits = 0.0

    def count_prompt(self, text: str) -> CountedPrompt | None:
        """Counts the words and runs of words in a row's prompt, and returns what was counted.

        None if an equal prompt was counted before.
        """
        words = words_of(text)
        spaced = " ".join(words).encode("utf-8", errors="surrogatepass")
        identity = hashlib.blake2b(spaced, digest_size=16).digest()
        if identity in self._seen:
            return None
        counted = CountedPrompt(identity, _words_and_runs(words) & self._num_texts_with.keys())
        self.take(counted)
        return counted

    def take(self, counted: CountedPrompt) -> None:
        """Adds the counts of a prompt from another index; a prompt seen before changes nothing."""
        if counted.identity not in self._seen:
            self._seen.add(counted.identity)
            self._num_texts_with.update(counted.runs)

    def close(self) -> None:
        """Ends the counting, and separates each prompt's boilerplate from its distinctive words."""
        num_texts = len(self._prompts) + len(self._seen)
        self._least_bits = math.log2(num_texts * len(self._prompts) / _CHANCE)
        many = max(_LEAST_SHARED, min(20, num_texts / 2), 0.02 * num_texts)
        prompts_with: defaultdict[Run, list[int]] = defaultdict(list)
        starting: defaultdict[Run, list[Run]] = defaultdict(list)
        for number, prompt in enumerate(self._prompts):
            distinctive = self._find_distinctive(prompt.words, many, num_texts)
            self._distinctive.append(distinctive)
            for words in filter(None, (prompt.words, prompt.core)):
                if self._whole.setdefault(words, number) == number and (
                    len(words) >= _LEAST_WORDS_EMBEDDED
                ):
                    starting[self._rarest(words)].append(words)
            is_known = num_texts >= _FEW_TEXTS
            least = _LEAST_WORDS_EMBEDDED if is_known else _LEAST_WORDS_AMONG_FEW
            if len(prompt.words) >= least and sum(distinctive.bits) >= self._least_bits:
                for run in distinctive.runs:
                    prompts_with[run].append(number)
        self._prompts_with, self._starting = dict(prompts_with), dict(starting)
        self._leave_out_templates()

    def _leave_out_templates(self) -> None:
        """Sees that prompts which are near one another are found only unchanged.

        The prompts of an evaluation are different tasks. Where they would count as copies of one
        another, a word or two make another task. If this holds for some of the short prompts, they
        come from one set of templates, and it holds for all.
        """
        alike = set[int]()
        for number, prompt in enumerate(self._prompts):
            near = self._near(list(prompt.words), apart_from=number)
            if near is not None:
                alike |= {number, near}
        short = [n for n, prompt in enumerate(self._prompts) if len(prompt.words) < _SHORT]
        if len(alike.intersection(short)) > _ALIKE_SHARE * len(short):
            alike.update(short)
        if alike:
            without = {run: [n for n in numbers if n not in alike]
                       for run, numbers in self._prompts_with.items()}  # fmt: skip
            self._prompts_with = {run: numbers for run, numbers in without.items() if numbers}

    def find(
        self, user_texts: Iterable[str], other_texts: Iterable[str] = (), *, near: bool = True
    ) -> Contamination | None:
        """Returns an evaluation prompt that one of a row's texts holds; None if they hold none.

        Of several, the one that is held most closely is returned. Without `near` changed prompts
        are not looked for.
        """
        held: dict[ContaminationLevel, int] = {}
        texts = [(text, True) for text in user_texts] + [(text, False) for text in other_texts]
        for text, is_users in texts:
            words = words_of(text)
            if (number := self._whole.get(tuple(words))) is not None:
                return Contamination(self._prompts[number].where, "exact")
            if "contained" not in held:
                number = self._contained(words)
                if number is None and is_users:
                    number = self._among_sentences(text)
                if number is not None:
                    held["contained"] = number
            if near and not held and (number := self._near(words)) is not None:
                held["near"] = number
        for level in LEVELS:
            if level in held:
                return Contamination(self._prompts[held[level]].where, level)
        return None

    def _find_distinctive(
        self, words: tuple[str, ...], many: float, num_texts: int
    ) -> _Distinctive:
        """Returns the parts of a prompt that are not in runs which many texts share.

        If all of its runs are about equally frequent, texts repeat the prompt itself, and no run is
        boilerplate.
        """
        runs = list(_runs(words))
        counts = [self._num_texts_with[run] for run in runs]
        clearly = max(many, 2 * (min(counts) + 1))
        is_shared = [count >= clearly for count in counts]
        # Runs next to shared ones join them to the prompt's own words, and copies may lack them.
        inner = [
            count
            for start, count in enumerate(counts)
            if not any(is_shared[max(0, start - RUN + 1) : start + RUN])
        ]
        if inner:
            enough = max(_LEAST_SHARED, 3 * (min(inner) + 1))
            is_shared = [count >= min(clearly, enough) for count in counts]
        is_distinctive = [True] * len(words)
        for start, run in enumerate(runs):
            if is_shared[start]:
                is_distinctive[start : start + RUN] = [False] * len(run)
        bits = [
            math.log2(num_texts / self._num_texts_with[(word,)]) if is_own else 0.0
            for word, is_own in zip(words, is_distinctive, strict=True)
        ]
        own = frozenset(run for run, shared in zip(runs, is_shared, strict=True) if not shared)
        return _Distinctive(own, tuple(bits), tuple(is_distinctive), sum(is_distinctive))

    def _rarest(self, words: tuple[str, ...]) -> Run:
        """Returns the rarest run of a prompt, by which the prompt is looked up."""
        return min(_runs(words), key=lambda run: self._num_texts_with[run])

    def _contained(self, words: list[str]) -> int | None:
        hits = self._starting.keys() & set(_runs(words))
        if not hits:
            return None
        spaced = f" {' '.join(words)} "
        held = (self._whole[prompt] for run in hits for prompt in self._starting[run]
                if f" {' '.join(prompt)} " in spaced)  # fmt: skip
        return min(held, default=None)

    def _among_sentences(self, text: str) -> int | None:
        """Returns a short prompt that makes up one or more whole sentences of a text."""
        sentences = [words for part in _SENTENCE_END.split(text) if (words := words_of(part))]
        for start in range(len(sentences)):
            joined: Run = ()
            for sentence in sentences[start:]:
                joined += tuple(sentence)
                if len(joined) >= _LEAST_WORDS_EMBEDDED:
                    break
                if len(joined) >= _LEAST_WORDS_OF_SENTENCES and joined in self._whole:
                    return self._whole[joined]
        return None

    def _near(self, words: list[str], apart_from: int | None = None) -> int | None:
        hits = self._prompts_with.keys() & set(_runs(words))
        if not hits:
            return None
        shared = Counter(number for run in hits for number in self._prompts_with[run])
        likely = [
            number
            # Not by most_common: it keeps equal counts in the order of the set `hits`, which
            # differs from process to process.
            for number, count in sorted(shared.items(), key=lambda item: (-item[1], item[0]))
            if count >= _LEAST_SHARED_RUNS * len(self._distinctive[number].runs)
            and number != apart_from
        ]
        return next((number for number in likely if self._is_near(number, words, hits)), None)

    def _is_near(self, number: int, words: list[str], hits: set[Run]) -> bool:
        prompt, distinctive = self._prompts[number].words, self._distinctive[number]
        window = _densest_window(words, distinctive.runs & hits, round(len(prompt) * _WINDOW) + RUN)
        if len(prompt) > _LONGEST_ALIGNED:
            # Alignment takes quadratic time; with this many words, shared runs are reliable enough.
            shared = distinctive.runs & set(_runs(window))
            return len(shared) >= _LEAST_RUNS_OF_LONG * len(distinctive.runs)
        matcher = difflib.SequenceMatcher(None, prompt, window, autojunk=False)
        blocks = matcher.get_matching_blocks()
        matched = sum(sum(distinctive.is_distinctive[b.a : b.a + b.size]) for b in blocks)
        bits = sum(sum(distinctive.bits[b.a : b.a + b.size]) for b in blocks)
        return matched >= distinctive.min_matching_words and bits >= self._least_bits


def _runs(words: Sequence[str]) -> Iterator[Run]:
    """Returns the runs of three words in order; fewer than three words make a single run."""
    if len(words) < RUN:
        return iter((tuple(words),) if words else ())
    return zip(words, words[1:], words[2:], strict=False)


def _words_and_runs(words: Sequence[str]) -> set[Run]:
    """Returns the words of a text, each as a run of its own, and the runs of three words."""
    return {(word,) for word in words} | set(_runs(words))


def _densest_window(words: list[str], runs: frozenset[Run] | set[Run], length: int) -> list[str]:
    """Returns the part of a text with the most of the given runs.

    It begins up to a quarter of `length` before a run, and ends up to `length` words after the
    run's start.
    """
    starts = [start for start, run in enumerate(_runs(words)) if run in runs]
    best_start, best_count, end = 0, 0, 0
    for index, start in enumerate(starts):
        while end < len(starts) and starts[end] < start + length:
            end += 1
        if end - index > best_count:
            best_start, best_count = start, end - index
    # The prompt's first words may be among the changed ones.
    begin = max(0, best_start - length // 4)
    return words[begin : best_start + length]
