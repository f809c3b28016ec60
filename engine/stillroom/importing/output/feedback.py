"""Settles which rollout each judgement is about, and what its reward is."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from stillroom.importing.joining.intake import Intake
from stillroom.importing.joining.join import JoinedRows
from stillroom.importing.joining.row_table import hashed_id
from stillroom.importing.records import Refusal
from stillroom.importing.tally import ImportTally

_PREFIX = ".score."


def settled_feedback(
    intake: Intake, joined: JoinedRows, tally: ImportTally
) -> dict[int, dict[str, float]]:
    """Returns the scores that rows of their own give to rollouts, by kept row.

    Feedback about a row is its rollout's; that about a group is that of all of its rollouts. Of
    several scores with one name the last counts. Feedback that is about no rollout is refused.
    """
    scores: defaultdict[int, dict[str, float]] = defaultdict(dict)
    if not intake.feedback:
        return scores
    wanted = {hashed_id(feedback.about) for _, feedback in intake.feedback}
    judged: defaultdict[int, set[int]] = defaultdict(set)
    for key, row in intake.rows.judged():
        if key in wanted:
            judged[key].add(joined.owners[row])
    for name, feedback in intake.feedback:
        rollouts = judged.get(hashed_id(feedback.about), ())
        if not rollouts or not math.isfinite(feedback.value):
            reason = "score is not finite" if rollouts else "feedback about no row that was read"
            tally.refuse(name, Refusal(feedback.place, reason, feedback.about), is_read=True)
            continue
        tally.merge(name)
        for row in rollouts:
            scores[row][feedback.name] = feedback.value
    return scores


def reward_of(scores: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Returns the mean of the named scores; None if there are no names, or if one is missing.

    A name may have its system before it, as in `langfuse.score.helpful`.
    """
    plain = [name if name in scores else name.rpartition(_PREFIX)[2] for name in names]
    found = [scores[name] for name in plain if name in scores]
    return sum(found) / len(found) if found and len(found) == len(names) else None
