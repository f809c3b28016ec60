"""The first stage of a recipe whose input has answers: makes rollouts of logs and conversations."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stillroom.api.recipe.plan import RecipePlan
from stillroom.api.recipe.stages import Stages
from stillroom.files import read_json, write_json
from stillroom.importing.formats.datasets.feedback_tables import names_a_score
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.lineage import read_manifest
from stillroom.recipe.files import RecipeFiles, is_up_to_date
from stillroom.recipe.inputs import RecipePrompt, read_prompts
from stillroom.recipe.selection import is_wrong, read_answered
from stillroom.settings import Workspace

IMPORT = "import answers"


def with_logged_answers(
    workspace: Workspace, plan: RecipePlan, stages: Stages, files: RecipeFiles
) -> RecipePlan:
    """Returns the plan with the prompts of its input, and the file with the answers to them.

    A prompt that was answered several times has the answer with the best reward, or the first.
    """
    path = files.folder / "logged.jsonl"
    result = _imported(workspace, plan, stages, path)
    notes = [*plan.notes, *(f"{IMPORT}: {note}" for note in result.notes)]
    if result.refused:
        notes.append(
            f"{result.refused} of {result.read} rows of the input could not be imported: "
            f"{result.refused_file} says why"
        )
    best: dict[str, tuple[tuple[bool, float], bytes]] = {}
    worths: defaultdict[str, set[bool]] = defaultdict(set)
    for line, rollout in read_answered([path]):
        worth = (not is_wrong(rollout), rollout.reward or 0.0)
        worths[rollout.task_id].add(worth[0])
        if rollout.task_id not in best or worth > best[rollout.task_id][0]:
            best[rollout.task_id] = (worth, line)
    lines = [line for _, line in best.values()]
    logged = files.rollouts("logged-best", lines, plan.request, [path])
    if num_pairs := sum(len(kinds) == 2 for kinds in worths.values()):
        notes.append(
            f"{num_pairs} prompts have right and wrong answers, and only right ones are trained "
            f"on; make_dpo_pairs(input={workspace.shown(path)}) and dataset_type dpo use both"
        )
    read = read_prompts(files.folder / "logged.prompts.jsonl", system=None)
    return replace(
        plan,
        prompts=read.prompts,
        labelled=_with_system(plan.labelled, read.prompts),
        logged=logged,
        notes=[*notes, *read.notes],
    )


def _with_system(
    labelled: Sequence[RecipePrompt], prompts: Sequence[RecipePrompt]
) -> list[RecipePrompt]:
    """Returns labelled texts with the system message of all logged prompts, if it is one."""
    first = prompts[0].row["messages"][0]
    if first["role"] != "system" or any(one.row["messages"][0] != first for one in prompts):
        return list(labelled)
    return [
        one
        if one.row["messages"][0]["role"] == "system"
        else replace(one, row={**one.row, "messages": [first, *one.row["messages"]]})
        for one in labelled
    ]


def _imported(workspace: Workspace, plan: RecipePlan, stages: Stages, path: Path) -> ImportResult:
    """Imports the input, unless that is done, and returns the result.

    Where people have judged answers, as with a thumb, the lowest of their scores is the reward.
    """
    request = ImportRollouts(
        input=plan.request.input, output=workspace.shown(path), prompts=True, overwrite=True
    )
    kept, manifest = path.with_suffix(".json"), read_manifest(path)
    used = manifest.request.get("reward_from") if manifest is not None else None
    before = request.model_copy(update={"reward_from": tuple(used or ())})
    if kept.exists() and is_up_to_date(path, before):
        return read_json(kept, ImportResult)
    result = stages.do(IMPORT, "import_rollouts", request, ImportResult)
    if not result.rewarded and (opinions := _opinions(path)):
        judged = request.model_copy(update={"reward_from": ("|".join(opinions),)})
        result = stages.do(IMPORT, "import_rollouts", judged, ImportResult)
    write_json(kept, result)
    return result


def _opinions(path: Path) -> list[str]:
    """Returns the names of scores that are people's opinion, and 0 or 1 wherever they are given."""
    values: defaultdict[str, set[float]] = defaultdict(set)
    for _, rollout in read_answered([path]):
        for name, score in rollout.rewards.items():
            values[name].add(score)
    return [name for name in values if values[name] <= {0.0, 1.0} and names_a_score(name)]
