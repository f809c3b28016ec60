"""A sample of rows for a person to judge, and the verdicts that come back.

The sample has some rows of every band of rewards, with all categories as even as they can be.
"""

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillroom.curate.rows.sources import check_output, source_files
from stillroom.data.chat.views import Section, sections_of
from stillroom.data.checks import Problem, as_number
from stillroom.data.formats import CHECKS, RowFormat, detect_format
from stillroom.data.layouts.detect import as_rollout
from stillroom.data.row_files import decode_line, read_row_lines
from stillroom.errors import DataError, InputError
from stillroom.files import atomic_output, content_hash
from stillroom.lineage import Recording, write_manifest
from stillroom.lines import read_lines
from stillroom.settings import Workspace

_NO_REWARD, NO_CATEGORY, OTHERS = "no reward", "(none)", "(others)"
_MAX_CATEGORIES = 200

ReviewVerdict = Literal["keep", "drop"]
Count = Annotated[int, Field(ge=0)]


class SampleForReview(BaseModel):
    """Ask for rows that a person should judge."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Annotated[str, Field(description="Rollouts, SFT or DPO rows")]
    output: Annotated[str, Field(description="JSONL to fill in; a page beside it")]
    bands: Annotated[tuple[float, ...], Field(description="Edges of reward")] = (0.5, 0.8)
    counts: Annotated[tuple[Count, ...], Field(description="Of each band")] = (10, 20, 20)
    category_field: str = "task_type"
    seed: int = 0

    @model_validator(mode="after")
    def _belongs_together(self) -> "SampleForReview":
        if list(self.bands) != sorted(set(self.bands)):
            raise ValueError("bands must rise, e.g. [0.5, 0.8]")
        if len(self.counts) != len(self.bands) + 1:
            raise ValueError("counts must have one number more than bands: also below the first")
        if not any(self.counts):
            raise ValueError("counts must ask for a row")
        return self


class ReviewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line to fill in: `verdict` becomes keep or drop, `notes` hold any text."""

    id: str
    verdict: ReviewVerdict | None
    notes: str
    where: str
    format: str
    band: str
    category: str
    reward: float | None
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    prompt: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    chosen: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    rejected: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class BandCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows of a reward there are, and how many are in the sample."""

    band: str
    rows: int
    sampled: int


class ReviewSample(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a sample. read = rows of all bands + left out, always."""

    output: str
    page: str
    """For a person: the conversations, with buttons, and a download of the verdicts."""
    read: int
    sampled: int
    bands: list[BandCount]
    categories: dict[str, int]
    """Of the sample."""
    left_out: dict[str, int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result, and the rows that the page shows."""

    result: ReviewSample
    rows: list[ReviewRow]
    page: Path


def sample_for_review(workspace: Workspace, request: SampleForReview) -> Sampled:
    """Writes the sample and returns it. Raises DataError if there is nothing to judge."""
    files = [source.path for source in source_files(workspace, request.input)]
    output = workspace.output_file(request.output, what="output")
    page = workspace.output_file(output.with_suffix(".html"), what="output")
    check_output(output, files)
    _check_unreviewed(output)
    pool = _Pool(request)
    with Recording(files) as recording:
        for file in files:
            for line in read_row_lines(file):
                where = f"{workspace.shown(file)}:{line.number}"
                pool.add(decode_line(line), where)
        rows = pool.sample()
        if not rows:
            why = ", ".join(f"{count} {reason}" for reason, count in pool.left_out.items())
            raise DataError(
                f"none of the {pool.read} rows of {request.input!r} can be reviewed ({why})",
                "validate_dataset lists what is wrong with them",
            )
        with atomic_output(output) as writer:
            for row in rows:
                writer.write(row)
        write_manifest(
            output,
            written=writer,
            operation="sample_for_review",
            inputs=recording.records(),
            request=request.model_dump(mode="json"),
            counts={"read": pool.read, "sampled": len(rows)},
        )
    result = ReviewSample(
        output=workspace.shown(output),
        page=workspace.shown(page),
        read=pool.read,
        sampled=len(rows),
        bands=pool.band_counts(rows),
        categories=dict(Counter(row.category for row in rows).most_common(50)),
        left_out=dict(pool.left_out),
    )
    return Sampled(result, rows, page)


class _Pool:
    """Keeps the rows of every band and category that may be sampled, drawn by hash."""

    def __init__(self, request: SampleForReview) -> None:
        self._request = request
        self._names = [*band_names(request.bands), _NO_REWARD]
        # Rows without a reward: as many as of all bands, if there are no others.
        self._limits = dict(zip(self._names, [*request.counts, sum(request.counts)], strict=True))
        self._kept: dict[str, dict[str, list[tuple[int, int, ReviewRow]]]] = {}
        self._sizes: Counter[str] = Counter()
        self._categories: set[str] = set()
        self.left_out: Counter[str] = Counter()
        self.read = 0

    def add(self, value: dict[str, Any] | Problem, where: str) -> None:
        """Takes in one row of a file."""
        self.read += 1
        row = self._review_row(value, where)
        if isinstance(row, str):
            self.left_out[row] += 1
            return
        self._sizes[row.band] += 1
        kept = self._kept.setdefault(row.band, {}).setdefault(row.category, [])
        # Of the smallest hashes the largest goes first; so the rows' order does not matter.
        entry = (-_draw(self._request.seed, row), self.read, row)
        if len(kept) < self._limits[row.band]:
            heapq.heappush(kept, entry)
        elif kept:
            heapq.heappushpop(kept, entry)

    def _review_row(self, value: dict[str, Any] | Problem, where: str) -> ReviewRow | str:
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
            id=review_id(row, list(texts.values())),
            verdict=None,
            notes="",
            where=where,
            format=row_format,
            band=band_of(reward, self._request.bands),
            category=self._category(row),
            reward=reward,
            **texts,
        )

    def _category(self, row: Mapping[str, Any]) -> str:
        value = (row.get("metadata") or {}).get(self._request.category_field)
        name = NO_CATEGORY if value is None else str(value)[:100]
        if name not in self._categories and len(self._categories) >= _MAX_CATEGORIES:
            return OTHERS
        self._categories.add(name)
        return name

    def sample(self) -> list[ReviewRow]:
        """Returns the sample, band by band, its categories as even as they can be."""
        return [row for band in self._names for row in self._of_band(band)]

    def _of_band(self, band: str) -> Iterator[ReviewRow]:
        kept = self._kept.get(band, {})
        limit = self._limits[band]
        if band == _NO_REWARD and len(self._kept) > 1:
            limit = max(self._request.counts)
        taken = shares({name: len(rows) for name, rows in kept.items()}, limit)
        for name in sorted(kept):
            drawn = sorted(kept[name], reverse=True)[: taken[name]]
            yield from (row for _, _, row in drawn)

    def band_counts(self, rows: Sequence[ReviewRow]) -> list[BandCount]:
        """Returns the bands that have rows."""
        sampled = Counter(row.band for row in rows)
        return [
            BandCount(band=name, rows=self._sizes[name], sampled=sampled[name])
            for name in self._names
            if self._sizes[name]
        ]


def review_id(row: Mapping[str, Any], conversations: Sequence[Any]) -> str:
    """Returns the id by which filter_dataset finds a row again: its own, else a text hash."""
    row_id = row.get("id") or row.get("rollout_id")
    if isinstance(row_id, str) and row_id:
        return row_id
    return content_hash(conversations[0] if len(conversations) == 1 else conversations)


def band_names(edges: Sequence[float]) -> list[str]:
    """Returns the names of the bands between the edges, from the lowest."""
    if not edges:
        return ["any reward"]
    inner = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    return [f"below {edges[0]:g}", *inner, f"from {edges[-1]:g}"]


def band_of(reward: float | None, edges: Sequence[float]) -> str:
    """Returns the name of the band that a reward is in; an edge belongs to the band above it."""
    if reward is None:
        return _NO_REWARD
    return band_names(edges)[sum(reward >= edge for edge in edges)]


def shares(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Returns how many to take of each name, as evenly as they allow; in total `total` or all."""
    taken: dict[str, int] = {}
    remaining = min(total, sum(sizes.values()))
    names = sorted(sizes, key=lambda name: (sizes[name], name))
    for number, name in enumerate(names):
        taken[name] = min(sizes[name], remaining // (len(names) - number))
        remaining -= taken[name]
    return taken


def _draw(seed: int, row: ReviewRow) -> int:
    identity = f"{seed}:{row.id}:{row.where}".encode("utf-8", errors="replace")
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest())


def sections_of_review(row: ReviewRow) -> list[Section]:
    """Returns the conversations of a reviewed row, each with its title."""
    named = (("messages", row.messages), ("prompt", row.prompt), ("chosen", row.chosen),
             ("rejected", row.rejected))  # fmt: skip
    return [
        Section(title=None if title == "messages" else title, messages=messages)
        for title, messages in named
        if messages is not msgspec.UNSET
    ]


class _JudgedRow(msgspec.Struct):
    verdict: Any = None


class _ReviewedRow(_JudgedRow, kw_only=True):
    id: str


_JUDGED = msgspec.json.Decoder(_JudgedRow)
_REVIEWED = msgspec.json.Decoder(_ReviewedRow)


def _check_unreviewed(output: Path) -> None:
    """Raises InputError if the output holds verdicts, which cost a person's time."""
    if not output.exists():
        return
    try:
        filled = sum(_JUDGED.decode(line.data).verdict is not None for line in read_lines(output))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"the output {output} holds something else", "choose another") from error
    if filled:
        raise InputError(
            f"the output {output} holds {filled} verdicts", "choose another output to keep them"
        )


def read_verdicts(path: Path) -> dict[str, ReviewVerdict]:
    """Returns the verdict on each reviewed row by its id; a later line replaces an earlier one.

    Rows whose verdict is null were not reviewed. Raises DataError for a line that says neither
    keep nor drop, and for a file without any verdict.
    """
    verdicts: dict[str, ReviewVerdict] = {}
    for line in read_row_lines(path):
        where = f"{path}:{line.number}"
        try:
            row = _REVIEWED.decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{where}: is no reviewed row: {error}",
                'write {"id": "<id of the row>", "verdict": "keep"} or "drop" on each line',
            ) from error
        match row.verdict:
            case None:
                continue
            case "keep" | "drop":
                verdicts[row.id] = row.verdict
            case other:
                raise DataError(
                    f"{where}: verdict {other!r} is unknown", 'write "keep", "drop" or null'
                )
    if not verdicts:
        raise DataError(
            f"{path} holds no verdict", "review its rows first: set verdict to keep or drop"
        )
    return verdicts
