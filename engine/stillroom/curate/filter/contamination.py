"""Finds rows that hold a prompt of an evaluation file, either unchanged or slightly changed.

A row holds a prompt unchanged if a text of the row has the prompt's words one after the other.
It holds the prompt slightly changed if it has, close together and in order, most of the words by
which this prompt differs from others. Words within runs that many prompts share (instructions,
templates) are boilerplate and do not count: a task from the same template with other numbers or
names is another task.
"""

import difflib
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.curate.rows.words import user_texts, words_of
from stillroom.data.checks import Problem
from stillroom.data.formats import CHECKS, RowFormat, detect_format, task_from_row
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import (
    decode_line,
    decode_text_line,
    read_row_lines,
    rollout_files,
)
from stillroom.errors import DataError

RUN = 3
_LEAST_OWN_SHARE = 0.75
"""The share of a prompt's distinctive words that a row must have to hold the prompt."""
_LEAST_TEMPLATE_SHARE = 0.85
"""The same share for a prompt with boilerplate: there, one value of six makes another task."""
_LEAST_WORDS_EMBEDDED = 8
"""A shorter prompt counts only as a whole text: short ones like `Why?` are part of many texts."""
_LEAST_OWN_WORDS = 4
"""A prompt with fewer distinctive words is found only unchanged."""
_FREE_SHARE = 0.8
"""A prompt with at least this share of distinctive words counts as free of boilerplate."""
_LEAST_SHARED_RUNS = 0.2
"""Rows that share less of a prompt's distinctive runs are ruled out without an alignment."""
_WINDOW = 1.4
"""The length of the part of a text that is compared, relative to the prompt's length."""
_LONGEST_ALIGNED = 400
"""Longer prompts (in words) are compared by their runs instead of an alignment."""
_LEAST_RUNS_OF_LONG = 0.55
"""The share of a long prompt's distinctive runs that a row must have to hold it."""

Run = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EvaluationPrompt:
    """The words of a prompt that must not be trained on, and its place as `file:line`."""

    where: str
    words: tuple[str, ...]


def evaluation_prompts(path: Path) -> Iterator[EvaluationPrompt]:
    """Yields the prompts in a file or folder of any format: the user's messages of each row.

    Raises DataError for a row that has a problem, as skipping its prompt could let it be trained
    on, and for a file without prompts.
    """
    num_prompts = 0
    for file in [path] if path.is_file() else rollout_files(path):
        decode = decode_text_line if file.suffix == ".txt" else decode_line
        for line in read_row_lines(file):
            where = f"{file}:{line.number}"
            text = "\n".join(user_texts(_messages(decode(line), where)))
            num_prompts += 1
            yield EvaluationPrompt(where, tuple(words_of(text)))
    if not num_prompts:
        raise DataError(f"the evaluation file {path} holds no prompts", "give another one")


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
    """The place of the evaluation prompt that a row holds, and whether it holds it unchanged."""

    where: str
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _Distinctive:
    """The parts of a prompt that are distinctive, that is, not boilerplate."""

    runs: frozenset[Run]
    is_distinctive: tuple[bool, ...]
    """Whether the word is distinctive, for each word of the prompt."""
    num_words: int

    @property
    def least_words(self) -> float:
        """The least number of distinctive words that a row must have to hold the prompt."""
        is_free = self.num_words >= _FREE_SHARE * len(self.is_distinctive)
        return (_LEAST_OWN_SHARE if is_free else _LEAST_TEMPLATE_SHARE) * self.num_words


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """What the prompt of a training row adds to the counts by which boilerplate is found."""

    identity: bytes
    runs: set[Run]
    """The runs of words in the row's prompt that also occur in evaluation prompts."""


class ContaminationIndex:
    """Finds evaluation prompts in rows, after it has learned which of their words are boilerplate.

    First call `count_prompt` for the prompt of every row, then `close`, which ends the counting,
    and then `find` for each row.
    """

    def __init__(self, prompts: Iterable[EvaluationPrompt]) -> None:
        distinct = {prompt.words: prompt for prompt in prompts if prompt.words}
        self._prompts = list(distinct.values())
        self._num_prompts_with = Counter(
            run for prompt in self._prompts for run in set(_runs(prompt.words))
        )
        self._num_rows_with: Counter[Run] = Counter()
        self._seen: set[bytes] = set()
        self._distinctive: list[_Distinctive] = []
        self._prompts_with: dict[Run, list[int]] = {}
        self._whole: dict[tuple[str, ...], int] = {}
        self._starting: dict[Run, list[int]] = {}

    def count_prompt(self, text: str) -> CountedPrompt | None:
        """Counts the runs of words in a row's prompt, and returns what was counted.

        None if an equal prompt was counted before.
        """
        words = words_of(text)
        spaced = " ".join(words).encode("utf-8", errors="surrogatepass")
        identity = hashlib.blake2b(spaced, digest_size=16).digest()
        if identity in self._seen:
            return None
        counted = CountedPrompt(identity, set(_runs(words)) & self._num_prompts_with.keys())
        self.take(counted)
        return counted

    def take(self, counted: CountedPrompt) -> None:
        """Adds the counts of a prompt from another index; a prompt seen before changes nothing."""
        if counted.identity not in self._seen:
            self._seen.add(counted.identity)
            self._num_rows_with.update(counted.runs)

    def close(self) -> None:
        """Ends the counting, and separates each prompt's boilerplate from its distinctive words."""
        many_prompts = _many(len(self._prompts), share=0.01)
        many_rows = _many(len(self._seen), share=0.02)
        shared = {run for run, count in self._num_prompts_with.items() if count >= many_prompts}
        prompts_with: defaultdict[Run, list[int]] = defaultdict(list)
        starting: defaultdict[Run, list[int]] = defaultdict(list)
        for number, prompt in enumerate(self._prompts):
            distinctive = _distinctive(
                prompt.words, shared | self._frequent(prompt.words, many_rows)
            )
            self._distinctive.append(distinctive)
            self._whole[prompt.words] = number
            if len(prompt.words) < _LEAST_WORDS_EMBEDDED:
                continue
            starting[self._rarest(prompt.words)].append(number)
            if distinctive.num_words >= _LEAST_OWN_WORDS:
                for run in distinctive.runs:
                    prompts_with[run].append(number)
        self._prompts_with, self._starting = dict(prompts_with), dict(starting)

    def find(self, texts: Iterable[str]) -> Contamination | None:
        """Returns an evaluation prompt that one of a row's texts holds; None if they hold none.

        A prompt that is unchanged in any text takes precedence over a slightly changed one.
        """
        near: Contamination | None = None
        for words in map(words_of, texts):
            exact = self._exact(words)
            if exact is not None:
                return Contamination(self._prompts[exact].where, is_exact=True)
            if near is None and (number := self._near(words)) is not None:
                near = Contamination(self._prompts[number].where, is_exact=False)
        return near

    def _frequent(self, words: tuple[str, ...], many: float) -> set[Run]:
        """Returns the runs of a prompt that many rows have without having the rest of the prompt.

        If all of its runs are about equally frequent, rows repeat the prompt itself, and no run is
        boilerplate.
        """
        counts = {run: self._num_rows_with[run] for run in _runs(words)}
        enough = max(many, 2 * (min(counts.values()) + 1))
        return {run for run, count in counts.items() if count >= enough}

    def _rarest(self, words: tuple[str, ...]) -> Run:
        """Returns the rarest run of a prompt, by which the prompt is looked up."""
        count = self._num_prompts_with
        return min(_runs(words), key=lambda run: count[run] + self._num_rows_with[run])

    def _exact(self, words: list[str]) -> int | None:
        whole = self._whole.get(tuple(words))
        if whole is not None:
            return whole
        hits = self._starting.keys() & set(_runs(words))
        if not hits:
            return None
        spaced = f" {' '.join(words)} "
        numbers = sorted(number for run in hits for number in self._starting[run])
        return next((n for n in numbers if f" {' '.join(self._prompts[n].words)} " in spaced), None)

    def _near(self, words: list[str]) -> int | None:
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
        matched = sum(
            sum(distinctive.is_distinctive[block.a : block.a + block.size])
            for block in matcher.get_matching_blocks()
        )
        return matched >= distinctive.least_words


def _runs(words: Sequence[str]) -> Iterator[Run]:
    """Returns the runs of three words in order; fewer than three words make a single run."""
    if len(words) < RUN:
        return iter((tuple(words),) if words else ())
    return zip(words, words[1:], words[2:], strict=False)


def _many(total: int, *, share: float) -> float:
    """Returns the least number of `total` texts that must have a run to make it boilerplate.

    It is half of the texts, at most 20, and at least 3, until `share` of all texts is more.
    """
    return max(3, min(20, total / 2), share * total)


def _distinctive(words: tuple[str, ...], shared: set[Run]) -> _Distinctive:
    is_distinctive = [True] * len(words)
    runs = list(_runs(words))
    for start, run in enumerate(runs):
        if run in shared:
            is_distinctive[start : start + len(run)] = [False] * len(run)
    runs_left = frozenset(run for run in runs if run not in shared)
    return _Distinctive(runs_left, tuple(is_distinctive), sum(is_distinctive))


def _densest_window(words: list[str], runs: frozenset[Run] | set[Run], length: int) -> list[str]:
    """Returns the part of a text that has the most of the given runs.

    It has up to `length` words from a run on, and up to a quarter of `length` before it.
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
