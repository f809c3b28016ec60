"""The first stages of a recipe whose input has answers: turn them into rollouts, one a prompt."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from stillroom import fences
from stillroom.api.recipe.plan import RecipePlan
from stillroom.api.recipe.stages import Stages
from stillroom.data.words import user_texts
from stillroom.errors import RunError
from stillroom.files import content_hash, file_sha256, read_json, write_json
from stillroom.importing.formats.datasets.feedback_tables import is_thumb
from stillroom.importing.redaction import Redaction
from stillroom.importing.request import ImportResult, ImportRollouts
from stillroom.lineage import matches_record, read_manifest
from stillroom.recipe.answers import object_in
from stillroom.recipe.files import RecipeFiles
from stillroom.recipe.inputs import LABELS_FROM, RecipePrompt, read_prompts
from stillroom.recipe.selection import AnsweredRollout, is_cut_off, is_wrong, read_rollouts
from stillroom.rollout.request import NO_FILE
from stillroom.rollout.rescore.request import ScoreRollouts
from stillroom.settings import Workspace

IMPORT, SCORE = "import answers", "score answers"
_SOURCE_REWARDS = ("reward", "preferred")


def with_logged_answers(
    workspace: Workspace, plan: RecipePlan, stages: Stages, files: RecipeFiles
) -> RecipePlan:
    """Returns the plan with the prompts of its input, and the file with the answers to them.

    The rows of a table or a prompts file become conversations first.

    A prompt with several answers gets the one with the best reward, or the commonest of equally
    good ones. Conversations that branch from another are left out, so that no part of a
    conversation is both trained on and evaluated on.

    Raises RunError if answers call tools and there is no tools.py.
    """
    source = plan.request.input
    if plan.prompts:
        lines = [msgspec.json.encode(_conversation(prompt)) for prompt in plan.prompts]
        table = files.write_recorded("answered", lines, plan.request, plan.inputs)
        source = workspace.shown(table)
    path, result = _import_answers(workspace, plan, stages, source)
    notes = [*plan.notes, *(f"{IMPORT}: {note}" for note in result.notes)]
    if plan.rewards == NO_FILE:
        notes += _notes_on_unused_scores(path, result)
    if result.refused:
        notes.append(
            f"{result.refused} of {result.read} rows of the input could not be imported: "
            f"{result.refused_file} says why"
        )
    scored = path
    if plan.rewards != NO_FILE:
        scored = path.with_name(f"{path.stem}-scored.jsonl")
        request = ScoreRollouts(
            input=workspace.shown(path), output=workspace.shown(scored), rewards=plan.rewards
        )
        stages.run(SCORE, "score_rollouts", request)
    best = _best_rollouts(scored)
    if plan.teacher.tools == NO_FILE and any(
        rollout.has_tool_calls for _, rollout in best.values()
    ):
        raise RunError(
            "answers of the input call tools, so the student cannot be evaluated without those "
            "tools",
            "put a tools.py that defines them next to the input",
        )
    lines = [line for line, _ in best.values()]
    logged = files.write_recorded("logged-best", lines, plan.request, [scored])
    read = read_prompts(path.with_name(f"{path.stem}.prompts.jsonl"), system=None)
    prompts = [prompt for prompt in read.prompts if prompt.task_id in best]
    if plan.rewards == NO_FILE:
        # Text answers are not parsed as objects here, since that would change their task ids.
        prompts = [
            prompt if prompt.answer is not None else prompt.with_object() for prompt in prompts
        ]
    labelled = plan.labelled
    if plan.rewards == NO_FILE:
        labelled = _with_logged_fields(plan, [rollout for _, rollout in best.values()], notes)
    system, _ = commonest_system(prompts)
    return replace(
        plan,
        prompts=prompts,
        labelled=_as_logged(workspace, labelled, system),
        logged_file=logged,
        notes=[*notes, *read.notes],
    )


def _conversation(prompt: RecipePrompt) -> dict[str, Any]:
    """Returns a prompt and its right answer as the row of a conversation."""
    answer = {"role": "assistant", "content": prompt.answer}
    row = prompt.without_answer().row
    return {"messages": [*row["messages"], answer], "metadata": row["metadata"]}


def _import_answers(
    workspace: Workspace, plan: RecipePlan, stages: Stages, source: str
) -> tuple[Path, ImportResult]:
    """Returns the file with the imported rollouts, named by the input's hash, and the result.

    Where people gave a thumb up or down, the reward is the lower of that and the source's reward.
    """
    key = content_hash({str(file): file_sha256(file) for file in plan.inputs})[:8]
    path = plan.folder / f"logged-{key}.jsonl"
    result_file = path.with_suffix(".json")
    manifest = read_manifest(path) if path.exists() else None
    if result_file.exists() and manifest is not None and matches_record(path, manifest.output):
        return path, read_json(result_file, ImportResult)
    request = ImportRollouts(input=source, output=workspace.shown(path), prompts=True)
    result = stages.call(IMPORT, "import_rollouts", request, ImportResult)
    if thumb_names := _thumb_names(path):
        names = "|".join([*_SOURCE_REWARDS, *thumb_names])
        judged = request.model_copy(update={"reward_from": (names,)})
        result = stages.call(IMPORT, "import_rollouts", judged, ImportResult)
    write_json(result_file, result)
    return path, result


def _notes_on_unused_scores(path: Path, result: ImportResult) -> Iterator[str]:
    """Yields a note if logs with thumbs have other scores too, which the reward leaves out."""
    thumbs = _thumb_names(path)
    unused = [name for name in result.scores if name not in thumbs]
    if thumbs and unused and set(unused).isdisjoint(_SOURCE_REWARDS):
        yield (
            f"only thumbs say which answers are wrong; the scores "
            f"{', '.join(map(fences.safe_name, unused))} have no effect: to use them, import the "
            "logs with reward_from (ratings as stars>=4), and give those rollouts as input"
        )


def _thumb_names(path: Path) -> list[str]:
    """Returns the names of the scores that are a thumb up or down in every rollout."""
    values: defaultdict[str, set[float]] = defaultdict(set)
    for _, rollout in read_rollouts([path]):
        for name, score in rollout.rewards.items():
            values[name].add(score)
    return [
        name
        for name, scores in values.items()
        if scores <= {-1.0, 0.0, 1.0} and len(scores) > 1 and is_thumb(name)
    ]


def _best_rollouts(path: Path) -> dict[str, tuple[bytes, AnsweredRollout]]:
    """Returns the best rollout of each task, by the task's id."""
    by_task: defaultdict[str, list[tuple[bytes, AnsweredRollout]]] = defaultdict(list)
    for line, rollout in read_rollouts([path]):
        if rollout.origin.branch_of is None:
            by_task[rollout.task_id].append((line, rollout))
    best: dict[str, tuple[bytes, AnsweredRollout]] = {}
    for task_id, answered in by_task.items():
        times = Counter(rollout.answer for _, rollout in answered)
        best[task_id] = max(
            answered,
            key=lambda pair: (
                not is_cut_off(pair[1]),
                not is_wrong(pair[1]),
                pair[1].reward or 0.0,
                times[pair[1].answer],
            ),
        )
    return best


def _with_logged_fields(
    plan: RecipePlan, rollouts: Sequence[AnsweredRollout], notes: list[str]
) -> list[RecipePrompt]:
    """Returns the labelled prompts, whose answers are objects if those of the logs are.

    That is so if a table's labels are from a column that is a field of most logged answers, and the
    other fields are columns too. Otherwise only that field is trained, which a note says.
    """
    column, labelled = plan.label_column, list(plan.labelled)
    objects = [object_in(rollout.answer) or {} for rollout in rollouts]
    counts = Counter(map(tuple, objects))
    [(fields, count)] = counts.most_common(1) or [((), 0)]
    others = [name for name in fields if name != column]
    if column not in fields or not others or 2 * count < len(rollouts):
        return labelled
    shown = ", ".join(map(fences.safe_name, fields))
    # The notes below say which columns have the right answers.
    notes[:] = [note for note in notes if LABELS_FROM not in note]
    # Empty cells are missing from the metadata.
    columns = {name for prompt in labelled for name in prompt.row["metadata"]}
    missing = [name for name in others if name not in columns]
    if missing:
        notes.append(
            f"the logged answers have the fields {shown}, but `labelled` lacks "
            f"{', '.join(map(fences.safe_name, missing))}: only {fences.safe_name(column)} is "
            "trained; to train all, give `labelled` a column for each"
        )
        return labelled
    notes.append(f"the right answers are objects of the columns {shown}, like the logged ones")
    logged = {name: [values[name] for values in objects if name in values] for name in fields}
    return [prompt.with_answer(_object_of(prompt, logged, column)) for prompt in labelled]


def _object_of(prompt: RecipePrompt, logged: Mapping[str, list[Any]], column: str | None) -> str:
    """Returns a labelled prompt's answer and its other columns as a JSON object.

    logged: the logged values of each field.
    """
    cells = {**prompt.row["metadata"], column: prompt.answer}
    values = {name: _as_logged_value(cells.get(name), logged[name]) for name in logged}
    return json.dumps(values, ensure_ascii=False)


def _as_logged_value(cell: Any, logged: Sequence[Any]) -> Any:
    """Returns a table's cell with the type of the logged values, since CSV has only texts."""
    if cell is None:
        return "" if "" in logged and None not in logged else None
    if any(isinstance(value, str) for value in logged):
        return str(cell)
    if not isinstance(cell, str):
        return cell
    try:
        value = json.loads(cell.lower())
    except ValueError:
        return cell
    return value if isinstance(value, int | float | None) else cell


def commonest_system(prompts: Sequence[RecipePrompt]) -> tuple[str | None, float]:
    """Returns the commonest system message of prompts, and the share of prompts that have it."""
    counts = Counter(
        first["content"] if (first := prompt.row["messages"][0])["role"] == "system" else None
        for prompt in prompts
    )
    [(system, count)] = counts.most_common(1) or [(None, 0)]
    return system, count / max(1, len(prompts))


def _as_logged(
    workspace: Workspace, labelled: Sequence[RecipePrompt], system: str | None
) -> list[RecipePrompt]:
    """Returns labelled prompts as an import writes them: without secrets and personal data.

    Prompts without a system message get `system`.
    """
    redaction = Redaction(workspace.redactor(), keep_secrets=False, keep_personal=False)
    prompts = list[RecipePrompt]()
    for prompt in labelled:
        messages = list(prompt.row["messages"])
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        redaction.begin_conversation()
        messages = [redaction.redact_message(message) for message in messages]
        text = "\n".join(user_texts(messages))
        row = {**prompt.row, "messages": messages}
        if metadata := prompt.row.get("metadata"):
            row["metadata"] = redaction.redact_metadata(metadata)
        answer = prompt.answer and redaction.redact_text(prompt.answer)
        prompts.append(replace(prompt, row=row, text=text, answer=answer))
    return prompts
