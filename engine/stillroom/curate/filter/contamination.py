"""Contamination: a row that holds a prompt of an evaluation file, as it is or slightly changed.

A prompt is there as it is if its words stand in the row in their order; slightly changed if the
row has, close together and in order, most of the words that make this prompt differ from others.
Words within runs that many prompts share (instructions, templates) are boilerplate and do not
count: a task from the same template with other numbers or names is another task.
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
"""The share of a prompt's distinctive words that must be there."""
_LEAST_TEMPLATE_SHARE = 0.85
"""The same for a prompt with boilerplate: one value of six makes another task of its template."""
_LEAST_WORDS_EMBEDDED = 8
"""A shorter prompt counts only where a message consists of it: `Why?` stands in many."""
_LEAST_OWN_WORDS = 4
_FREE_SHARE = 0.8
_LEAST_SHARED_RUNS = 0.2
_WINDOW = 1.4
_LONGEST_ALIGNED = 400
_LEAST_RUNS_OF_LONG = 0.55

Run = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EvaluationPrompt:
    """A prompt that must not be trained on, and its `file:line`."""

    where: str
    words: tuple[str, ...]


def evaluation_prompts(path: Path) -> Iterator[EvaluationPrompt]:
    """Yields the prompts of a file or folder in any format: what the user says in each row.

    Raises DataError at a row that has a problem: a prompt that is passed over would be trained on.
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
    """The evaluation prompt that a row holds."""

    where: str
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _Distinctive:
    """The parts of a prompt that are distinctive: no boilerplate."""

    runs: frozenset[Run]
    is_distinctive: tuple[bool, ...]
    """For each word of the prompt."""
    num_words: int

    @property
    def least_words(self) -> float:
        """How many of the distinctive words must be there."""
        is_free = self.num_words >= _FREE_SHARE * len(self.is_distinctive)
        return (_LEAST_OWN_SHARE if is_free else _LEAST_TEMPLATE_SHARE) * self.num_words


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """The parts of a row's prompt that tell what is boilerplate."""

    identity: bytes
    runs: set[Run]
    """The runs that evaluation prompts have, too."""


class ContaminationIndex:
    """The prompts of evaluation files, and what of them is boilerplate.

    First every row's prompt goes through `count_prompt`, then `close` ends the counting, then
    `find` answers for each row.
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
        """Counts the runs of a row's prompt, and returns them; None of a prompt seen before."""
        words = words_of(text)
        spaced = " ".join(words).encode("utf-8", errors="surrogatepass")
        identity = hashlib.blake2b(spaced, digest_size=16).digest()
        if identity in self._seen:
            return None
        counted = CountedPrompt(identity, set(_runs(words)) & self._num_prompts_with.keys())
        self.take(counted)
        return counted

    def take(self, counted: CountedPrompt) -> None:
        """Takes in a prompt that was counted elsewhere; one seen before changes nothing."""
        if counted.identity not in self._seen:
            self._seen.add(counted.identity)
            self._num_rows_with.update(counted.runs)

    def close(self) -> None:
        """Ends the counting, and tells boilerplate from the distinctive words of each prompt."""
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
        """Returns the evaluation prompt that a row's texts hold; an exact one comes first."""
        near: Contamination | None = None
        for words in map(words_of, texts):
            exact = self._exact(words)
            if exact is not None:
                return Contamination(self._prompts[exact].where, is_exact=True)
            if near is None and (number := self._near(words)) is not None:
                near = Contamination(self._prompts[number].where, is_exact=False)
        return near

    def _frequent(self, words: tuple[str, ...], many: float) -> set[Run]:
        """Returns the runs of a prompt that many rows have without the rest of it.

        Where all of its runs are as frequent, it is the prompt itself that many rows repeat.
        """
        counts = {run: self._num_rows_with[run] for run in _runs(words)}
        enough = max(many, 2 * (min(counts.values()) + 1))
        return {run for run, count in counts.items() if count >= enough}

    def _rarest(self, words: tuple[str, ...]) -> Run:
        """Returns the run by which a prompt is looked up: that which fewest others have."""
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
            # Not by most_common: the order of equals would be another one in each process.
            for number, count in sorted(shared.items(), key=lambda item: (-item[1], item[0]))
            if count >= _LEAST_SHARED_RUNS * len(self._distinctive[number].runs)
        ]
        return next((number for number in likely if self._is_near(number, words, hits)), None)

    def _is_near(self, number: int, words: list[str], hits: set[Run]) -> bool:
        prompt, distinctive = self._prompts[number].words, self._distinctive[number]
        window = _densest_window(words, distinctive.runs & hits, round(len(prompt) * _WINDOW) + RUN)
        if len(prompt) > _LONGEST_ALIGNED:
            # Aligning takes quadratic time; with so many words the runs alone are sure enough.
            shared = distinctive.runs & set(_runs(window))
            return len(shared) >= _LEAST_RUNS_OF_LONG * len(distinctive.runs)
        matcher = difflib.SequenceMatcher(None, prompt, window, autojunk=False)
        matched = sum(
            sum(distinctive.is_distinctive[block.a : block.a + block.size])
            for block in matcher.get_matching_blocks()
        )
        return matched >= distinctive.least_words


def _runs(words: Sequence[str]) -> Iterator[Run]:
    """Yields the runs of three words; of fewer words the one run they are."""
    if len(words) < RUN:
        return iter((tuple(words),) if words else ())
    return zip(words, words[1:], words[2:], strict=False)


def _many(total: int, *, share: float) -> float:
    """Returns in how many of `total` texts a run is boilerplate: half of few, a share of many."""
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
    """Returns the stretch of at most `length` words that begins at a run and holds most of them."""
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
