"""Keeps the answers of an unfinished evaluation, so that its repetition does not pay for them.

While an evaluation runs, its folder holds the rollouts and journals of its parts in a folder that
is named after all that shapes an answer. An evaluation that starts with the same name takes over
the folder of one that was killed, cancelled or stopped by its budget.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from stillroom.evaluate.request import EvaluationPlan
from stillroom.files import content_hash, file_sha256
from stillroom.models.resolve import ModelLocation
from stillroom.rollout.plan import RolloutPlan, output_settings
from stillroom.rollout.results import RolloutOrigin
from stillroom.run_folder import all_runs
from stillroom.settings import Workspace
from stillroom.teachers.model_choice import ModelChoice
from stillroom.teachers.pricing import has_own_price
from stillroom.teachers.providers import Endpoint

_NOT_SHAPING = {
    *("name", "group_by", "sampled_prompts", "kl_prompts"),
    # recorded by their contents
    *("data", "guard", "teacher"),
}
"""The options that may change before an evaluation is repeated, besides those of its rollouts."""


def answers_folder(plan: EvaluationPlan, origin: RolloutOrigin) -> str:
    """Returns the name of the folder with the answers of an evaluation with this plan.

    Two evaluations have the same name if each answer of one could be an answer of the other.
    """
    rollouts, guard = plan.rollouts, plan.guard
    settings = output_settings(rollouts, origin.weights, origin.chat_templates)
    shaping = {
        **{name: value for name, value in settings.items() if name not in _NOT_SHAPING},
        # Unlike an output, which its user resumes, nobody asks for the answers in which the model
        # read that a tool took too long, or that it may not open a page.
        "tool_timeout": rollouts.options.tool_timeout,
        "browse_allow": rollouts.options.browse_allow,
        "models": msgspec.to_builtins(origin.models),
        "guard_sha256": guard and file_sha256(guard.prompts_file),
    }
    return f"answers-{content_hash(shaping)}"


def take_over_answers(
    workspace: Workspace, folder: Path, plan: EvaluationPlan, origin: RolloutOrigin
) -> str | None:
    """Moves the answers of an unfinished evaluation with the same settings to the run `folder`.

    Of several it takes the one with the most answers.

    Returns the id of that evaluation's run; None if there is none, or if the model or the judge may
    have changed since then: a server of the user's own may now serve other weights under their
    names.
    """
    name = answers_folder(plan, origin)
    if not _is_fixed(workspace, plan.rollouts, origin) or (folder / name).exists():
        return None
    sizes = {
        run: _num_bytes(run.path / name)
        for run in all_runs(workspace)
        if run.path != folder and not run.is_remote
    }
    # A run whose lock is held when it starts does not start, so only those with answers are locked.
    for run in sorted(filter(sizes.get, sizes), key=sizes.__getitem__, reverse=True):
        owner = run.owner_lock()
        # A running evaluation holds the lock, and deletes its answers when it has finished.
        if not owner.try_acquire():
            continue
        try:
            (run.path / name).rename(folder / name)
        except FileNotFoundError:
            # Another evaluation has just taken them over.
            continue
        finally:
            owner.release()
        return run.run_id
    return None


def _num_bytes(answers: Path) -> int:
    """Returns the size in bytes of a folder's rollouts and finished calls; 0 without a folder."""
    # A running evaluation deletes its answers when it has finished.
    with suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in answers.rglob("*.jsonl") if file.is_file())
    return 0


def _is_fixed(workspace: Workspace, plan: RolloutPlan, origin: RolloutOrigin) -> bool:
    """Whether the names of the model, an adapter's base and the judge identify their weights."""
    own = [model for model in origin.models if model.role in ("policy", "base")]
    is_local = isinstance(plan.policy, ModelLocation)
    # The commit of a hub model that is not in the hub's cache yet is unknown.
    if is_local and not all(model.sha256 or model.revision for model in own):
        return False
    return all(
        _is_sold(workspace, model, location)
        for model, location in plan.models_called
        if isinstance(location, Endpoint)
    )


def _is_sold(workspace: Workspace, model: ModelChoice, endpoint: Endpoint) -> bool:
    """Whether an endpoint sells the model's answers.

    A server on this machine may serve other weights under a name in the list of prices, so only a
    price in prices.yml counts there.
    """
    price = model.price(workspace)
    if price is None or not price.is_charged:
        return False
    return not endpoint.is_on_this_machine or has_own_price(workspace, model.model)
