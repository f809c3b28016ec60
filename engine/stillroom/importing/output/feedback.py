"""Assigns the scores in feedback rows to rollouts, and computes rewards from scores."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stillroom.errors import InputError
from stillroom.fences import safe_name
from stillroom.importing.conversations.collector import RowCollector
from stillroom.importing.conversations.rollouts import JoinedRows
from stillroom.importing.conversations.row_table import RowTable, hash_of_id
from stillroom.importing.records import NO_CALL_FOUND, RefusedRow
from stillroom.importing.tally import ImportTally

_PREFIX = ".score."
_SOURCE_REWARDS = ("reward", "preferred")
"""The names of an environment's reward, and of the score that rows of preference pairs get."""
_AT_LEAST = re.compile(r"(.+?)\s*>=\s*(-?\d*\.?\d+)")
_COMPARED = re.compile(r"(.*?)\s*[<>=]")
_STARS = re.compile(r"(?:(?<![A-Za-z])s|S)tars?(?![a-z])")
_RATING = re.compile(rf"{_STARS.pattern}|(?:(?<![A-Za-z])r|R)ating")
_COMMON_STARS = 5


def scores_from_feedback(
    collected: RowCollector, joined: JoinedRows, tally: ImportTally, *, id_field: str | None = None
) -> dict[int, dict[str, float]]:
    """Returns the scores from feedback rows, by kept row.

    Feedback on a row applies to its rollout, and feedback on a group to all rollouts of the group.
    An id that is neither is looked up in the other ids and the metadata of rows. With `id_field`,
    ids are looked up in that field first. Of several values of a score, the lowest one is returned,
    and the rollout is added to `tally.conflicting_rows` if they differ. Feedback without a matching
    rollout is refused.
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
            refused = (
                RefusedRow(feedback.location, "score is not finite", target)
                if matching
                else RefusedRow(feedback.location, NO_CALL_FOUND, not_found)
            )
            tally.refuse(name, refused, is_read=True)
            continue
        tally.count_merged(name)
        for row in matching:
            if add_lowest(scores[row], {feedback.name: feedback.value}):
                tally.conflicting_rows.add(row)
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


@dataclass(frozen=True, slots=True)
class _UsedScore:
    """A score that is a part of a reward."""

    name: str
    score: float
    lowest_good: float | None
    """The limit from which a score counts as 1, and below as 0; None uses the score unchanged."""

    @property
    def reward(self) -> float:
        return self.score if self.lowest_good is None else float(self.score >= self.lowest_good)


def reward_of(scores: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Returns the mean of the named scores, or None if one of them is missing.

    A name may have a prefix for its system, as in `langfuse.score.helpful`. Of `thumbs|rating`, the
    lowest score that is present counts. `stars>=4` counts as 1 from 4 stars on, and as 0 below.
    Without names, returns the score that its source calls a reward or a preference.
    """
    if not names:
        return next((scores[name] for name in _SOURCE_REWARDS if name in scores), None)
    used = [found for name in names if (found := _used_scores(scores, name))]
    lowest = [min(score.reward for score in found) for found in used]
    return sum(lowest) / len(lowest) if len(lowest) == len(names) else None


def alternatives_differ(scores: Mapping[str, float], names: Sequence[str]) -> bool:
    """Returns whether the alternatives of an `a|b` among the names have different scores."""
    return any(len({each.reward for each in _used_scores(scores, name)}) > 1 for name in names)


def _used_scores(scores: Mapping[str, float], names: str) -> list[_UsedScore]:
    """Returns the score with this name, or those with the names of `a|b`; empty without any."""
    for alternatives in ([names], names.split("|")):
        used = [each for name in alternatives if (each := _used_score(scores, name)) is not None]
        if used:
            return used
    return []


def _used_score(scores: Mapping[str, float], name: str) -> _UsedScore | None:
    limited = _AT_LEAST.fullmatch(name)
    candidates: list[tuple[str, float | None]] = [(name, None)]
    if limited is not None:
        candidates.append((limited[1], float(limited[2])))
    for full_name, lowest_good in candidates:
        for plain in (full_name, full_name.rpartition(_PREFIX)[2]):
            if plain in scores:
                return _UsedScore(plain, scores[plain], lowest_good)
    return None


@dataclass(slots=True)
class _Scale:
    """The range of a score that rewards use unchanged."""

    lowest: float = math.inf
    highest: float = -math.inf
    is_feedback: bool = False
    num_scores: int = 0

    def lowest_good(self, name: str) -> float:
        """Suggests a limit above the middle of the stars (five or more) or of the scores found."""
        if _RATING.search(name):
            return (1 + max(self.highest, _COMMON_STARS)) // 2 + 1
        middle = (self.lowest + self.highest) / 2
        steps = (middle // 1 + 1, round(middle, 2))
        return next((step for step in steps if self.lowest < step <= self.highest), self.highest)


class RewardScales:
    """The scales of the scores in rewards, where 0.5 and more must be a success."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are those of `reward_of`."""
        self._names = names
        self._scales: defaultdict[str, _Scale] = defaultdict(_Scale)

    def add(self, scores: Mapping[str, float], feedback: Mapping[str, float]) -> None:
        """Adds the scores of a rollout, of which `feedback` are those in separate rows."""
        named = self._names or [name for name in _SOURCE_REWARDS if name in scores][:1]
        for used in (each for name in named for each in _used_scores(scores, name)):
            if used.lowest_good is None:
                scale = self._scales[used.name]
                scale.lowest = min(scale.lowest, used.score)
                scale.highest = max(scale.highest, used.score)
                scale.is_feedback |= used.name in feedback
                scale.num_scores += 1

    def check(self) -> None:
        """Raises InputError if a rating, such as 1 to 5 stars, has no limit or an invalid one.

        A source's own reward may have any scale.
        """
        for part in (part for name in self._names for part in name.split("|")):
            compared = _COMPARED.match(part)
            found = not self._scales.keys().isdisjoint((part, part.rpartition(_PREFIX)[2]))
            if compared is not None and not found and not _AT_LEAST.fullmatch(part):
                raise InputError(
                    f"{safe_name(part)} in reward_from is neither a score of the sources nor a "
                    "valid limit",
                    f"write {safe_name(compared[1])}>=NUMBER, with the lowest good score",
                )
        for name, scale in self._scales.items():
            if name in _SOURCE_REWARDS and not scale.is_feedback:
                continue
            if scale.highest > 1 or (scale.lowest >= 1 and _STARS.search(name)):
                shown = safe_name(name)
                raise InputError(
                    f"the score {shown} ranges from {scale.lowest:g} to {scale.highest:g} (in "
                    f"{scale.num_scores} rollouts), but any reward from 0.5 on is a success",
                    "name the lowest good score in reward_from of import_rollouts, such as "
                    f'["{shown}>={scale.lowest_good(name):.10g}"]: it counts as 1, and lower ones '
                    "as 0. run_recipe then takes the output of that import as its input",
                )
