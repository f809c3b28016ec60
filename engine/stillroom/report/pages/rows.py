"""The page of a data file's rows: conversations, or every token and whether it is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.data.chat.views import Section
from stillroom.data.inspect import InspectExamples, Inspection
from stillroom.report.conversation import ShownConversation, chat_messages, conversation
from stillroom.report.environment import render_page, write_page


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation of a row as the page shows it."""

    title: str | None
    parts: ShownConversation


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
        talks=talks,
    )
    write_page(path, html)


def talks(sections: Sequence[Section]) -> list[Talk]:
    """Returns whole conversations, in which long texts can be unfolded."""
    return [
        Talk(section.title, conversation(chat_messages(section.messages), is_whole=True))
        for section in sections
    ]
