"""Takes source rows in, and shows what an import would make of them, without files."""

from contextlib import contextmanager
from pathlib import Path

from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.rollouts import RolloutBuilder, join_rows
from stillroom.importing.records import Location, LoggedConversation
from stillroom.importing.redaction import Redaction
from stillroom.importing.spill import Spill
from stillroom.importing.tally import ImportTally
from stillroom.secrecy.redaction import NO_SECRETS

FILE = Path("log.jsonl")


class Taken:
    """What was collected, joined."""

    def __init__(self, collected, tally, refused):
        self.collected, self.tally, self.refused = collected, tally, refused
        self.joined = join_rows(collected.rows, collected.tree)
        builder = RolloutBuilder(collected, self.joined, None)
        self.rollouts = {row: builder.build(row) for row in self.joined.kept}


@contextmanager
def taken(folder, rows):
    """Yields the rollouts that rows make."""
    refused = []
    redaction = Redaction(NO_SECRETS, keep_secrets=True, keep_personal=True)
    with Spill(folder) as spill:
        tally = ImportTally(refused.append, str, str)
        collected = RowCollector(spill, redaction, tally)
        for row in rows:
            collected.add(row, "calls")
        yield Taken(collected, tally, refused)


def logged(line, *texts, is_call=True, **fields):
    """Returns a row of alternating texts of the user and the assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    location = Location(FILE, line)
    return LoggedConversation(location=location, messages=messages, is_call=is_call, **fields)
