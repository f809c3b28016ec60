"""Settles which rollout each judgement is about, and what its reward is."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.rollouts import JoinedRows
from stillroom.importing.conversations.row_table import hashed_id
from stillroom.importing.records import Refusal
from stillroom.importing.tally import ImportTally

_PREFIX = ".score."
_OWN_REWARDS = ("reward", "preferred")
"""The scores that a source itself means as the reward: an environment's, and those of pairs."""


def settled_feedback(
    collected: RowCollector, joined: JoinedRows, tally: ImportTally
) -> dict[int, dict[str, float]]:
    """Returns the scores that rows of their own give to rollouts, by kept row.

    Feedback about a row is its rollout's; that about a group is that of all of its rollouts. Of
    several scores with one name the last counts. Feedback that is about no rollout is refused.
    """
    scores: defaultdict[int, dict[str, float]] = defaultdict(dict)
    if not collected.feedback:
        return scores
    wanted = {hashed_id(feedback.about) for _, feedback in collected.feedback}
    judged: defaultdict[int, set[int]] = defaultdict(set)
    for key, row in collected.rows.judged():
        if key in wanted:
            judged[key].add(joined.owners[row])
    for name, feedback in collected.feedback:
        rollouts = judged.get(hashed_id(feedback.about), ())
        if not rollouts or not math.isfinite(feedback.value):
            reason = "score is not finite" if rollouts else "feedback about no call that was kept"
            tally.refuse(name, Refusal(feedback.place, reason, feedback.about), is_read=True)
            continue
        tally.merge(name)
        for row in rollouts:
            scores[row][feedback.name] = feedback.value
    return scores


def reward_of(scores: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Returns the mean of the named scores, or None if one of them is missing.

    A name may have its system before it, as in `langfuse.score.helpful`, and may be several of
    which the first that is there counts, as in `thumbs|rating`. Without names the score that the
    source itself means as the reward is taken, if it has one.
    """
    if not names:
        return next((scores[name] for name in _OWN_REWARDS if name in scores), None)
    found = [score for name in names if (score := _named_score(scores, name)) is not None]
    return sum(found) / len(found) if len(found) == len(names) else None


def _named_score(scores: Mapping[str, float], names: str) -> float | None:
    for name in (names, *names.split("|")):
        for plain in (name, name.rpartition(_PREFIX)[2]):
            if plain in scores:
                return scores[plain]
    return None
