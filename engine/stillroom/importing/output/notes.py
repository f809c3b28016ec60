"""What is to be known of an import before its rollouts are used."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from stillroom.fences import on_one_line
from stillroom.importing.output.rows import UNKNOWN, RolloutCounts
from stillroom.importing.output.split import Split
from stillroom.importing.output.terms import terms_notes
from stillroom.importing.payloads.messages import IMAGES_LOST
from stillroom.importing.request import ImportRollouts
from stillroom.importing.sources import ImportSources

_SHOWN, _MOST_NAMES = 3, 12
_LONGEST_NAME = 60


def import_notes(
    request: ImportRollouts,
    sources: ImportSources,
    grown: Sequence[Path],
    counts: RolloutCounts,
    models: Mapping[tuple[str, str], int],
    split: Split | None,
) -> Iterator[str]:
    """Yields the notes, the ones about a fault of the sources first."""
    if sources.unread:
        names = _listed(path.name for path in sources.unread[:_SHOWN])
        more = len(sources.unread) - _SHOWN
        yield (
            f"{len(sources.unread)} files are of no known format: {names}"
            + (f" and {more} more" if more > 0 else "")
        )
    if grown:
        yield f"{len(grown)} files grew while they were read: import again for what was added"
    yield from _notes_on_content(counts)
    yield from _notes_on_scores(request, counts)
    if request.prompts and counts.differently_answered:
        yield (
            f"{counts.differently_answered} prompts have right answers that do not match, and so "
            "no expected_answer: reward_from says which one is best, a judge or rewards.py judges "
            "them"
        )
    if request.prompts and counts.unanswered_prompts:
        yield (
            f"{counts.unanswered_prompts} prompts have no expected_answer, since all their answers "
            "were judged wrong or are cut: evaluate_model leaves these out, often the hard ones, "
            "unless a judge or rewards.py judges them"
        )
    if request.prompts and counts.contradicted:
        yield (
            f"{counts.contradicted} prompts have an expected_answer of their source that a rollout "
            "judged right does not contain: a judge or rewards.py is fairer than the match"
        )
    if split is not None:
        yield from split.notes
    yield from terms_notes(models)


def _notes_on_content(counts: RolloutCounts) -> Iterator[str]:
    if missing := counts.losses[IMAGES_LOST]:
        yield (
            f"{missing} rollouts lost images: their answers are about what a text model cannot see"
        )
    if unknown := counts.losses[UNKNOWN]:
        yield (
            f"{unknown} rollouts call tools whose schemas were not logged: infer_tools makes "
            "schemas from the calls"
        )
    if counts.unanswered:
        yield (
            f"{counts.unanswered} assistant turns of histories were answered by no call that was "
            "read (examples, edits, calls not logged): they have weight 0 and are not trained"
        )


def _notes_on_scores(request: ImportRollouts, counts: RolloutCounts) -> Iterator[str]:
    names = _listed(name for name, _ in counts.scores.most_common(_MOST_NAMES)) or "none"
    if not request.reward_from and counts.rewarded:
        yield f"{counts.rewarded} rollouts have the reward that their source gives them"
    elif not request.reward_from and counts.scores:
        yield (
            f"the sources have scores ({names}) and nothing is a reward: import again with those "
            "that say right or wrong in reward_from, or wrong answers are trained too"
        )
    if counts.largest_reward > 1:
        yield (
            f"rewards go up to {counts.largest_reward:g}, and success means a reward of at least "
            "0.5: choose rows by min_reward of filter_dataset"
        )
    if request.reward_from and not counts.rewarded:
        yield (
            f"no rollout has all of reward_from; the sources' scores are: {names}. Where sources "
            "name them differently, one entry takes whichever is there: a|b"
        )


def _listed(names: Iterable[str]) -> str:
    """Returns names that others gave, each on one line and cut."""
    return ", ".join(on_one_line(name, most=_LONGEST_NAME) for name in names)
