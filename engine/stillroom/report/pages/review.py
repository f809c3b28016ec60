"""The page on which a person judges conversations and downloads the verdicts."""

import json

from stillroom.curate.review import Sampled, sections_of_review
from stillroom.files import content_hash
from stillroom.report.environment import render_page, write_page
from stillroom.report.pages.rows import talks


def write_review_page(sampled: Sampled) -> None:
    """Writes the page on which a person judges the sampled rows."""
    rows = sampled.rows
    bands = [band.band for band in sampled.result.bands if band.sampled]
    html = render_page(
        "review.html.j2",
        script="review.js",
        name=sampled.result.output,
        groups=[(band, [row for row in rows if row.band == band]) for band in bands],
        sections=sections_of_review,
        talks=talks,
        total=len(rows),
        read=sampled.result.read,
        # What was judged is kept in the browser under this name until it is downloaded.
        key=content_hash([[row.id, row.where] for row in rows]),
        file=json.dumps(sampled.page.with_suffix(".verdicts.jsonl").name)[1:-1],
    )
    write_page(sampled.page, html)
