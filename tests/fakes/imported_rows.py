"""The rollouts that source rows become, without files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stillroom.importing.bodies.facts import iso_time
from stillroom.importing.joining.intake import Intake
from stillroom.importing.joining.join import joined_rows
from stillroom.importing.joining.rollouts import Composer
from stillroom.importing.joining.spill import Spill
from stillroom.importing.records import RawRow
from stillroom.importing.redaction import Redaction
from stillroom.importing.tally import ImportTally
from stillroom.secrecy.redaction import NO_SECRETS


def imported(folder: Path, rows: Iterable[RawRow]) -> list[Any]:
    """The messages, facts and losses of the rollouts that source rows make, and refused rows."""
    refused: list[Any] = []
    with Spill(folder) as spill:
        tally = ImportTally(_Rows(refused), str, str)
        redaction = Redaction(NO_SECRETS, keep_secrets=False, keep_personal=False)
        intake = Intake(spill, redaction, tally)
        for row in rows:
            intake.take(row, "some format")
        joined = joined_rows(intake.rows, intake.tree)
        composer = Composer(intake, joined, redaction)
        rollouts = [composer.compose(row) for row in joined.kept]
        tools = [intake.tools.united([r.kept.tools] if r.kept.tools >= 0 else []) for r in rollouts]
        judged = sorted(intake.rows.judged())
    return [
        (json.loads(r.messages), json.loads(r.metadata), sorted(r.losses), offered,
         [(f.source, f.id, f.group, f.provider, f.model, f.usage, f.cost_usd, f.duration_s,
           iso_time(f.started_at), f.finish_reason, f.scores) for f in r.facts])
        for r, offered in zip(rollouts, tools, strict=True)
    ] + [judged] + refused  # fmt: skip


class _Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.write = rows.append
