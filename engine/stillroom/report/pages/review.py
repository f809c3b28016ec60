"""The page on which a person judges conversations and downloads the verdicts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.curate.review import ReviewRow, Sampled, sections_of_review
from stillroom.files import content_hash
from stillroom.report.environment import render_page, write_page
from stillroom.report.pages.rows import Talk, talks
from stillroom.report.wording import number


@dataclass(frozen=True, slots=True)
class Card:
    """One row to judge."""

    id: str
    where: str
    reward: str | None
    category: str
    band: str
    talks: Sequence[Talk]


def write_review_page(sampled: Sampled) -> None:
    """Writes the page on which a person judges the sampled rows."""
    cards = [_card(row) for row in sampled.rows]
    bands = [band.band for band in sampled.result.bands if band.sampled]
    html = render_page(
        "review.html.j2",
        script="review.js",
        name=sampled.result.output,
        groups=[(band, [card for card in cards if card.band == band]) for band in bands],
        total=len(cards),
        read=sampled.result.read,
        # What was judged is kept in the browser under this name until it is downloaded.
        key=content_hash([[row.id, row.where] for row in sampled.rows]),
        file=json.dumps(sampled.page.with_suffix(".verdicts.jsonl").name)[1:-1],
    )
    write_page(sampled.page, html)


def _card(row: ReviewRow) -> Card:
    return Card(
        id=row.id,
        where=row.where,
        reward=None if row.reward is None else number(row.reward),
        category=row.category,
        band=row.band,
        talks=talks(sections_of_review(row)),
    )
