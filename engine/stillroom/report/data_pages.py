"""The pages about one data file: rows, distributions, and review."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from stillroom.curate.review import SampleWithPage
from stillroom.curate.rows import NO_CATEGORY, OTHERS
from stillroom.data.chat.views import Section, sections_of
from stillroom.data.formats import RowFormat
from stillroom.data.inspect import InspectExamples, Inspection
from stillroom.data.statistics import DatasetStatistics
from stillroom.data.token_counts import TokenCounts
from stillroom.data.validate import ValidationReport
from stillroom.files import content_hash
from stillroom.report.conversation import ShownConversation, conversation
from stillroom.report.drawing import HEIGHT, WIDTH, BarChart, bar_chart, distribution_chart
from stillroom.report.environment import render_page, write_page
from stillroom.report.wording import Figure, count, number, percent, plural
from stillroom.types import Message


@dataclass(frozen=True, slots=True)
class RowConversation:
    """One conversation of a row, for display."""

    title: str | None
    conversation: ShownConversation


def write_rows_page(path: Path, inspection: Inspection, request: InspectExamples) -> None:
    """Writes the page of the inspected rows."""
    first = request.start + 1
    html = render_page(
        "rows.html.j2",
        name=request.path,
        model=request.model,
        first=first,
        last=first + len(inspection.rows) - 1,
        total=inspection.page.total_count,
        rows=inspection.rows,
        conversations=conversations,
    )
    write_page(path, html)


def conversations(sections: Sequence[Section]) -> list[RowConversation]:
    """Returns the complete conversations of a row; long texts can be expanded."""
    return [
        RowConversation(
            section.title, conversation(cast("list[Message]", section.messages), is_whole=True)
        )
        for section in sections
    ]


_ROW_NOUNS = {
    RowFormat.PROMPTS: "prompt",
    RowFormat.ROLLOUTS: "rollout",
    RowFormat.SFT: "supervised row",
    RowFormat.DPO: "preference pair",
}
_MAX_CATEGORIES = 30
_MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class CategoryShare:
    """The number and share of rows in a category."""

    label: str
    value: str
    width: float


def write_dataset_page(
    path: Path, report: ValidationReport, statistics: DatasetStatistics, counts: TokenCounts | None
) -> None:
    """Writes the page about a validated file."""
    html = render_page(
        "dataset.html.j2",
        report=report,
        lead=_lead(report),
        figures=list(_figures(report, counts)),
        charts=[*dataset_charts(report.format, statistics), *_token_charts(counts)],
        categories=category_shares(statistics),
        counts=counts,
        width=WIDTH,
        height=HEIGHT,
    )
    write_page(path, html)


def _lead(report: ValidationReport) -> str:
    """Returns the first sentence of the page: how many rows there are, and how many are bad."""
    rows = plural(report.rows, _ROW_NOUNS[RowFormat(report.format)])
    if not report.bad:
        return f"{rows}, all well formed."
    problems = plural(report.num_problems, "problem")
    return f"{rows}, of which {count(report.bad)} have {problems}."


def _figures(report: ValidationReport, counts: TokenCounts | None) -> Iterator[Figure]:
    yield Figure("Good rows", count(report.good), f"of {count(report.rows)}")
    if report.good:
        share = percent(report.duplicates / report.good)
        yield Figure(
            "Duplicates",
            share,
            f"{count(report.duplicates)} repeat other rows; {count(report.copies)} are exact "
            "copies",
        )
    yield Figure("Size", f"{number(report.size_bytes / _MEGABYTE)} MB", "of all rows")
    if counts and counts.tokens:
        note = f"mean; longest of {count(counts.rows)} rows: {number(counts.tokens.high)}"
        yield Figure("Tokens per row", number(counts.tokens.mean), note)
    if report.rewards:
        yield Figure("Reward", number(report.rewards.mean), "mean of the rows with a reward")


def dataset_charts(row_format: str, statistics: DatasetStatistics) -> Iterator[BarChart]:
    """Yields a chart for each distribution in the statistics that has values."""
    planned = (
        (statistics.rewards, "Reward", "per row"),
        (statistics.turns, "Turns", "assistant turns per row"),
        (statistics.messages, "Messages", "per row"),
        (statistics.characters, "Characters", "in texts and calls, per row"),
    )
    for values, title, unit in planned:
        is_charted = row_format != RowFormat.PROMPTS or title != "Turns"
        chart = distribution_chart(values, title=title, unit=unit) if is_charted else None
        if chart is not None:
            yield chart


def _token_charts(counts: TokenCounts | None) -> Iterator[BarChart]:
    if counts is not None and counts.tokens is not None:
        total = sum(bar.count for bar in counts.bars)
        yield bar_chart(counts.bars, counts.tokens, total, "Tokens", "for the student, per row")


def category_shares(statistics: DatasetStatistics) -> Sequence[CategoryShare]:
    """Returns the number and share of rows in each of the most frequent categories."""
    total = statistics.categories.total() + statistics.uncategorized
    most_common = statistics.categories.most_common(_MAX_CATEGORIES)
    num_others = statistics.categories.total() - sum(num for _, num in most_common)
    categories = [*most_common, (OTHERS, num_others), (NO_CATEGORY, statistics.uncategorized)]
    largest = max((num for _, num in categories), default=1)
    return [
        CategoryShare(
            label, f"{count(num)} · {percent(num / total)}", round(100 * num / largest, 2)
        )
        for label, num in categories
        if num and statistics.categories
    ]


def write_review_page(sampled: SampleWithPage) -> None:
    """Writes the page on which a person judges the sampled rows."""
    rows: list[dict[str, Any]] = msgspec.to_builtins(sampled.rows)
    bands = [band.band for band in sampled.result.bands if band.sampled]
    html = render_page(
        "review.html.j2",
        script="review.js",
        name=sampled.result.output,
        groups=[(band, [row for row in rows if row["band"] == band]) for band in bands],
        sections=sections_of,
        conversations=conversations,
        total=len(rows),
        read=sampled.result.read,
        # The browser stores verdicts under this key until they are downloaded.
        key=content_hash([[row["id"], row["where"]] for row in rows]),
        file=json.dumps(sampled.page.with_suffix(".verdicts.jsonl").name)[1:-1],
    )
    write_page(sampled.page, html)
