"""The first stage of a recipe whose input has answers: makes rollouts of logs and conversations."""

from dataclasses import replace

from stillroom.api.recipe.plan import RecipePlan
from stillroom.api.recipe.stages import Stages
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.recipe.files import RecipeFiles, is_up_to_date
from stillroom.recipe.inputs import read_prompts
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
    request = ImportRollouts(
        input=plan.request.input, output=workspace.shown(path), prompts=True, overwrite=True
    )
    notes = list(plan.notes)
    if not is_up_to_date(path, request):
        result = stages.do(IMPORT, "import_rollouts", request, ImportResult)
        for note in result.notes:
            stages.note(f"{IMPORT}: {note}")
        if result.refused:
            notes.append(
                f"{result.refused} of {result.read} rows of the input could not be imported: "
                f"{result.refused_file} says why"
            )
    best: dict[str, tuple[tuple[bool, float], bytes]] = {}
    for line, rollout in read_answered([path]):
        worth = (not is_wrong(rollout), rollout.reward or 0.0)
        if rollout.task_id not in best or worth > best[rollout.task_id][0]:
            best[rollout.task_id] = (worth, line)
    lines = [line for _, line in best.values()]
    logged = files.rollouts("logged-best", lines, plan.request, [path])
    read = read_prompts(files.folder / "logged.prompts.jsonl", system=None)
    return replace(plan, prompts=read.prompts, logged=logged, notes=[*notes, *read.notes])
