"""What rollouts were made from and by whom, for the manifest: taken down before the first call."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from stillroom.lineage import FileRecord, ModelRecord, record_file
from stillroom.models.identity import identify
from stillroom.rollout.judge_request import NO_JUDGE
from stillroom.rollout.request import RolloutOptions, locate_policy, user_file
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS


@dataclass(frozen=True, slots=True)
class RolloutOrigin:
    """The files and the models of a rollout run."""

    inputs: Sequence[FileRecord]
    """The prompts first, then the user's Python files and the judge."""
    models: Sequence[ModelRecord]


async def origin_of(workspace: Workspace, options: RolloutOptions, prompts: Path) -> RolloutOrigin:
    """Returns the files and the model of a run as they are now."""
    return await anyio.to_thread.run_sync(_origin, workspace, options, prompts)


def _origin(workspace: Workspace, options: RolloutOptions, prompts: Path) -> RolloutOrigin:
    files = [
        prompts,
        user_file(workspace, options.tools, what="tools"),
        user_file(workspace, options.rewards, what="rewards"),
    ]
    if options.judge != NO_JUDGE:
        files.append(workspace.existing(options.judge, what="judge"))
    distinct = dict.fromkeys(file for file in files if file is not None)
    return RolloutOrigin([record_file(f) for f in distinct], [_policy(workspace, options)])


def _policy(workspace: Workspace, options: RolloutOptions) -> ModelRecord:
    if options.provider in IN_PROCESS:
        return identify(locate_policy(workspace, options), role="policy")
    return ModelRecord(
        role="policy", name=options.model, location=options.base_url or options.provider
    )
