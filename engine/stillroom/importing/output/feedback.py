"""Assigns the scores in feedback rows to rollouts, and computes rewards from scores."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.rollouts import JoinedRows
from stillroom.importing.conversations.row_table import RowTable, hash_of_id
from stillroom.importing.records import NO_CALL_FOUND, RejectedRow
from stillroom.importing.tally import ImportTally

_PREFIX = ".score."
_SOURCE_REWARDS = ("reward", "preferred")
"""The names of an environment's reward, and of the score that rows of preference pairs get."""


def scores_from_feedback(
    collected: RowCollector, joined: JoinedRows, tally: ImportTally, *, id_field: str | None = None
) -> dict[int, dict[str, float]]:
    """Returns the scores from feedback rows, by kept row.

    Feedback on a row applies to its rollout, and feedback on a group to all rollouts of the group.
    An id that is neither is looked up in the other ids and the metadata of rows. With `id_field`,
    ids are looked up in that field first. Of several values of a score, the lowest one is returned,
    and the rollout is added to `tally.disagreeing` if they differ. Feedback without a matching
    rollout is rejected.
    """
    scores: defaultdict[int, dict[str, float]] = defaultdict(dict)
    if not collected.feedback:
        return scores
    target_ids = {hash_of_id(feedback.target_id) for _, feedback in collected.feedback}
    rows, missing = collected.rows, target_ids
    feedback_targets: defaultdict[int, set[int]] = defaultdict(set)
    for targets in (rows.chosen_targets(), rows.feedback_targets(), rows.field_targets()):
        for key, row in targets:
            if key in missing:
                feedback_targets[key].add(joined.owners[row])
        missing = missing - feedback_targets.keys()
    searched = _searched_fields(rows, id_field)
    for name, feedback in collected.feedback:
        matching = feedback_targets.get(hash_of_id(feedback.target_id), ())
        tally.files.add_feedback(feedback, is_matched=bool(matching))
        if not matching or not math.isfinite(feedback.value):
            target = feedback.target_id
            not_found = f"{target} was not found in: {searched}"
            rejected = (
                RejectedRow(feedback.location, "score is not finite", target)
                if matching
                else RejectedRow(feedback.location, NO_CALL_FOUND, not_found)
            )
            tally.reject(name, rejected, is_read=True)
            continue
        tally.count_merged(name)
        for row in matching:
            if add_lowest(scores[row], {feedback.name: feedback.value}):
                tally.disagreeing.add(row)
    return scores


def add_lowest(scores: dict[str, float], added: Mapping[str, float]) -> bool:
    """Adds scores, keeps the lower of two values of one name, and returns whether any differed.

    The lowest value counts, so that an answer which anyone judged wrong is never taken as right.
    """
    differed = False
    for name, value in added.items():
        differed |= scores.setdefault(name, value) != value
        scores[name] = min(scores[name], value)
    return differed


def _searched_fields(rows: RowTable, field: str | None) -> str:
    """Returns the names of the fields in which ids were looked up, and what to do if none has them.

    `field` is the one that the user named.
    """
    chosen = [] if field is None else [*rows.chosen_fields] or [f"{field} (no row has this field)"]
    names = ", ".join(dict.fromkeys([*chosen, "id", "session", "trace", *rows.id_fields]))
    return f"{names}; set feedback_by to {'the' if field is None else 'another'} field that has it"


def reward_of(scores: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Returns the mean of the named scores, or None if one of them is missing.

    A name may have a prefix for its system, as in `langfuse.score.helpful`. Of `thumbs|rating`, the
    lowest score that is present counts. Without names, returns the score that its source calls a
    reward or a preference.
    """
    if not names:
        return next((scores[name] for name in _SOURCE_REWARDS if name in scores), None)
    present = [min(values) for name in names if (values := _named_scores(scores, name))]
    return sum(present) / len(present) if len(present) == len(names) else None


def have_different_scores(scores: Mapping[str, float], names: Sequence[str]) -> bool:
    """Returns whether the scores under the names of one `a|b` differ."""
    return any(len(set(_named_scores(scores, name))) > 1 for name in names)


def _named_scores(scores: Mapping[str, float], names: str) -> list[float]:
    """Returns the score with this name, or those with the names of `a|b`; empty without any."""
    for alternatives in ([names], names.split("|")):
        values: list[float] = []
        for name in alternatives:
            plain = name if name in scores else name.rpartition(_PREFIX)[2]
            if plain in scores:
                values.append(scores[plain])
        if values:
            return values
    return []
