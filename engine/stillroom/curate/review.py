"""sample_for_review: samples rows for a person to judge.

The sample has a given number of rows from each band of rewards, spread as evenly as possible over
the categories of the band.
"""

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field, model_validator

from stillroom.curate.rows import NO_CATEGORY, OTHERS
from stillroom.curate.sources import RowInputs, open_inputs
from stillroom.curate.verdicts import ReviewVerdict
from stillroom.data.chat.views import sections_of
from stillroom.data.checks import Problem, as_number
from stillroom.data.formats import CHECKS, RowFormat, detect_format
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import decode_line, read_row_lines
from stillroom.data.row_names import RowNames
from stillroom.data.statistics import category_in
from stillroom.errors import DataError, InputError
from stillroom.lineage import Recording
from stillroom.lines import read_lines
from stillroom.outputs import ReplacingRequest, check_page, new_output
from stillroom.settings import Workspace
from stillroom.types import OwnText

_NO_REWARD = "no reward"
_MAX_CATEGORIES = 200

Count = Annotated[int, Field(ge=0)]


class SampleForReview(ReplacingRequest):
    """The request for a sample of rows for a person to judge."""

    input: Annotated[str, Field(description="Rollouts, SFT or DPO rows")]
    output: Annotated[str, Field(description="JSONL to fill in; a page next to it")]
    bands: Annotated[tuple[float, ...], Field(description="Band edges")] = (
        0.5,
        0.8,
    )
    counts: Annotated[tuple[Count, ...], Field(description="Rows per band")] = (10, 20, 20)
    category_field: str = "task_type"
    seed: int = 0

    @model_validator(mode="after")
    def _validate_bands(self) -> "SampleForReview":
        if list(self.bands) != sorted(set(self.bands)):
            raise ValueError("bands must be in ascending order, e.g. [0.5, 0.8]")
        if len(self.counts) != len(self.bands) + 1:
            raise ValueError(
                "counts must have one number more than bands: the first is for the rewards below "
                "the first band edge"
            )
        if not any(self.counts):
            raise ValueError("at least one of the counts must be greater than 0")
        return self


class ReviewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled row, for a person to fill in `verdict` (keep or drop) and `notes` (any text)."""

    id: str
    """The row's name, by which filter_dataset matches the verdict to the row."""
    verdict: ReviewVerdict | None
    notes: str
    where: str
    format: str
    band: str
    category: str
    reward: float | None
    row_id: str | None = None
    """The row's own id, which other rows may share."""
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    prompt: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    chosen: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    rejected: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class BandCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of rows in one band of rewards, and how many of them are in the sample."""

    band: OwnText
    rows: int
    sampled: int


class ReviewSample(msgspec.Struct, frozen=True, kw_only=True):
    """The result of sampling. Always read = the rows of all bands + the sum of left_out."""

    output: str
    page: str
    """The HTML page that shows the conversations, with buttons to judge and download verdicts."""
    read: int
    sampled: int
    bands: list[BandCount]
    categories: dict[str, int]
    """The number of sampled rows per category; at most the 50 largest categories."""
    left_out: dict[OwnText, int]


@dataclass(frozen=True, slots=True)
class SampleWithPage:
    """The result of sampling, the sampled rows, and the path of the page that will show them."""

    result: ReviewSample
    rows: list[ReviewRow]
    page: Path


def sample_for_review(workspace: Workspace, request: SampleForReview) -> SampleWithPage:
    """Writes the sample as JSONL and returns it; the caller writes the page.

    Raises DataError if no row can be reviewed, and InputError if the output already has rollouts
    or verdicts.
    """
    output = workspace.output_file(request.output, label="output")
    page = workspace.output_file(output.with_suffix(".html"), label="output")
    pool = _CandidatePool(request)
    with open_inputs(workspace, [request.input], outputs=[output], with_supervised=True) as inputs:
        _check_no_verdicts(output)
        check_page(page, overwrite=request.overwrite)
        writing = new_output(output, operation="sample_for_review", overwrite=request.overwrite)
        with writing as new, Recording([source.path for source in inputs.files]) as recording:
            rows = pool.sample_inputs(inputs, workspace)
            for row in rows:
                new.rows.write(row)
            counts = {"read": pool.num_read, "sampled": len(rows)}
            records = inputs.records(recording.records())
            new.record(inputs=records, request=request, counts=counts)
    result = ReviewSample(
        output=workspace.shown(output),
        page=workspace.shown(page),
        read=pool.num_read,
        sampled=len(rows),
        bands=pool.band_counts(rows),
        categories=dict(Counter(row.category for row in rows).most_common(50)),
        left_out=dict(pool.left_out),
    )
    return SampleWithPage(result, rows, page)


class _CandidatePool:
    """Keeps the candidates for the sample, by band and category; a hash decides which ones stay."""

    def __init__(self, request: SampleForReview) -> None:
        self._request = request
        self._names = [*band_names(request.bands), _NO_REWARD]
        # If no row has a reward, rows without one fill the whole sample.
        self._limits = dict(zip(self._names, [*request.counts, sum(request.counts)], strict=True))
        self._candidates: dict[str, dict[str, list[tuple[int, int, ReviewRow]]]] = {}
        self._sizes: Counter[str] = Counter()
        self._categories: set[str] = set()
        self.left_out: Counter[str] = Counter()
        self.num_read = 0

    def sample_inputs(self, inputs: RowInputs, workspace: Workspace) -> list[ReviewRow]:
        """Reads all rows of the inputs and returns the sample.

        Raises DataError if no row can be reviewed.
        """
        for source in inputs.files:
            self.left_out.update(source.refused)
            self.num_read += sum(source.refused.values())
            names = RowNames()
            for line in read_row_lines(source.path):
                file, number = inputs.original_location(source.path, line.number)
                where = f"{workspace.shown(Path(file))}:{number}"
                self.add(decode_line(line), names.name(source.path, line.view), where)
        rows = self.sample()
        if not rows:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.left_out.items())
            raise DataError(
                f"none of the {self.num_read} rows of {self._request.input!r} can be reviewed"
                + (f" ({reasons})" if reasons else ""),
                "give rollouts, SFT or DPO rows; validate_dataset lists the problems of each row",
            )
        return rows

    def add(self, value: dict[str, Any] | Problem, name: str, where: str) -> None:
        """Counts one row of a file, and makes it a candidate if it can be reviewed."""
        self.num_read += 1
        row = self._review_row(value, name, where)
        if isinstance(row, str):
            self.left_out[row] += 1
            return
        self._sizes[row.band] += 1
        heap = self._candidates.setdefault(row.band, {}).setdefault(row.category, [])
        # The rows with the lowest ranks stay, so the sample does not depend on the rows' order.
        entry = (-_random_rank(self._request.seed, row), self.num_read, row)
        if len(heap) < self._limits[row.band]:
            heapq.heappush(heap, entry)
        elif heap:
            heapq.heappushpop(heap, entry)

    def _review_row(
        self, value: dict[str, Any] | Problem, name: str, where: str
    ) -> ReviewRow | str:
        """Returns the row for review, or the reason why it cannot be reviewed."""
        row_format = None if isinstance(value, Problem) else detect_format(value)
        if isinstance(value, Problem) or row_format is None or any(CHECKS[row_format](value)):
            return "has problems"
        if row_format is RowFormat.PROMPTS:
            return "no answer"
        row = as_rollout(value) if row_format is RowFormat.ROLLOUTS else value
        if row.get("error") is not None and row_format is RowFormat.ROLLOUTS:
            return "ended by an infrastructure failure"
        reward = as_number(row.get("reward"))
        texts = {section.title or "messages": section.messages for section in sections_of(row)}
        return ReviewRow(
            id=name,
            verdict=None,
            notes="",
            where=where,
            format=row_format,
            band=band_of(reward, self._request.bands),
            category=self._category(row),
            reward=reward,
            row_id=_row_id(row),
            **texts,
        )

    def _category(self, row: Mapping[str, Any]) -> str:
        value = category_in(row.get("metadata") or {}, self._request.category_field)
        name = NO_CATEGORY if value is None else value[:100]
        if name not in self._categories and len(self._categories) >= _MAX_CATEGORIES:
            return OTHERS
        self._categories.add(name)
        return name

    def sample(self) -> list[ReviewRow]:
        """Returns the sampled rows, band by band, spread as evenly as possible over categories."""
        return [row for band in self._names for row in self._sample_band(band)]

    def _sample_band(self, band: str) -> Iterator[ReviewRow]:
        """Yields the sampled rows of a band."""
        candidates = self._candidates.get(band, {})
        limit = self._limits[band]
        if band == _NO_REWARD and len(self._candidates) > 1:
            limit = max(self._request.counts)
        counts = spread_evenly({name: len(rows) for name, rows in candidates.items()}, limit)
        for name in sorted(candidates):
            sampled = sorted(candidates[name], reverse=True)[: counts[name]]
            yield from (row for _, _, row in sampled)

    def band_counts(self, rows: Sequence[ReviewRow]) -> list[BandCount]:
        """Returns the counts of the bands that have at least one row."""
        sampled = Counter(row.band for row in rows)
        return [
            BandCount(band=name, rows=self._sizes[name], sampled=sampled[name])
            for name in self._names
            if self._sizes[name]
        ]


def _row_id(row: Mapping[str, Any]) -> str | None:
    row_id = row.get("id") or row.get("rollout_id")
    return row_id if isinstance(row_id, str) else None


def band_names(edges: Sequence[float]) -> list[str]:
    """Returns the names of the bands between the edges, in ascending order."""
    if not edges:
        return ["any reward"]
    inner = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    return [f"below {edges[0]:g}", *inner, f"from {edges[-1]:g}"]


def band_of(reward: float | None, edges: Sequence[float]) -> str:
    """Returns the name of the band that a reward falls in; an edge belongs to the band above."""
    if reward is None:
        return _NO_REWARD
    return band_names(edges)[sum(reward >= edge for edge in edges)]


def spread_evenly(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns the number of rows to sample of each category, as even as the sizes allow.

    The numbers add up to `total`, or to the number of all rows if there are fewer.
    """
    counts: dict[str, int] = {}
    remaining = min(total, sum(sizes.values()))
    names = sorted(sizes, key=lambda name: (sizes[name], name))
    for number, name in enumerate(names):
        counts[name] = min(sizes[name], remaining // (len(names) - number))
        remaining -= counts[name]
    return counts


def _random_rank(seed: int, row: ReviewRow) -> int:
    """Returns a pseudorandom number that depends only on the seed and the row."""
    identity = f"{seed}:{row.id}:{row.where}".encode("utf-8", errors="replace")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest())


class _VerdictRow(msgspec.Struct):
    verdict: Any = None


_VERDICT_ROW = msgspec.json.Decoder(_VerdictRow)


def _check_no_verdicts(output: Path) -> None:
    """Raises InputError if the output already holds verdicts, which cost a person's time."""
    if not output.exists():
        return
    try:
        num_verdicts = sum(
            _VERDICT_ROW.decode(line.data).verdict is not None for line in read_lines(output)
        )
    except (msgspec.DecodeError, RecursionError):
        return  # These are not rows for review; new_output checks whether it may replace them.
    if num_verdicts:
        raise InputError(
            f"the output {output} has {num_verdicts} verdicts", "choose another output to keep them"
        )
