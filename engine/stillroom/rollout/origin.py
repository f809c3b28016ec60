"""What rollouts were made from and by whom, for the manifest: taken down before the first call."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec

from stillroom.lineage import AnsweringModel, FileRecord, ModelRecord, record_file
from stillroom.models.identity import identify
from stillroom.rollout.journal.records import FinishedRow
from stillroom.rollout.request import RolloutOptions, locate_policy, user_file
from stillroom.rollout.rewards.judge_request import NO_JUDGE, check_judge, judge_record
from stillroom.settings import Workspace
from stillroom.teachers.providers import IN_PROCESS, terms_of
from stillroom.types import Answerer

_MOST_SHOWN = 20

Answerers = tuple[Answerer, ...]
"""Who answered one row's calls."""


@dataclass(frozen=True, slots=True)
class RolloutOrigin:
    """The files and the models of a rollout run: the policy first, then the judge."""

    inputs: Sequence[FileRecord]
    """The prompts first, then the user's Python files and the judge."""
    models: Sequence[ModelRecord]

    @property
    def weights(self) -> str | None:
        """Which weights a model in this process has; None where that is not known."""
        return self.models[0].sha256 or self.models[0].revision


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
    models = [_policy(workspace, options)]
    if (judge := check_judge(workspace, options)) is not None:
        models.append(judge_record(judge))
    return RolloutOrigin([record_file(f) for f in distinct], models)


def _policy(workspace: Workspace, options: RolloutOptions) -> ModelRecord:
    if options.provider in IN_PROCESS:
        return identify(locate_policy(workspace, options), role="policy")
    return ModelRecord(
        role="policy",
        name=options.model,
        location=options.base_url or options.provider,
        terms=terms_of(options.provider, options.base_url),
    )


def with_answerers(models: Sequence[ModelRecord], rows: Iterable[FinishedRow]) -> list[ModelRecord]:
    """Returns the models of a run, those that were asked with those that answered in their name."""
    num_rows = {"policy": Counter[Answerers](), "judge": Counter[Answerers]()}
    for row in rows:
        num_rows["policy"][row.answered_by] += 1
        num_rows["judge"][row.judged_by] += 1
    return [
        msgspec.structs.replace(model, answered_by=answering_models(num_rows[model.role]))
        if model.role in num_rows
        else model
        for model in models
    ]


def answering_models(rows_of: Mapping[Answerers, int]) -> list[AnsweringModel]:
    """Returns the models that answered, by how many rows those have that answered together."""
    num_rows, fingerprints = Counter[str](), defaultdict[str, dict[str, None]](dict)
    for answerers, num in rows_of.items():
        num_rows.update(dict.fromkeys({one.model for one in answerers}, num))
        for one in answerers:
            if one.fingerprint is not None:
                fingerprints[one.model][one.fingerprint] = None
    return [
        AnsweringModel(model=model, rows=num, fingerprints=list(fingerprints[model])[:_MOST_SHOWN])
        for model, num in num_rows.most_common(_MOST_SHOWN)
    ]


class AnswererWatch:
    """Tells once of each model that an endpoint says answers for the one that was asked."""

    def __init__(
        self, asked: str, before: Iterable[Answerers] = (), *, whose: str = "each row"
    ) -> None:
        self._asked, self._whose = asked, whose
        self._seen = {one.model for answerers in before for one in answerers}

    def news(self, answerers: Sequence[Answerer]) -> Iterator[str]:
        """Yields what is to be told of who answered a rollout."""
        for model in dict.fromkeys(one.model for one in answerers):
            if model in self._seen:
                continue
            if self._seen:
                before = ", ".join(sorted(self._seen)[:_MOST_SHOWN])
                yield (
                    f"another model answers for {self._asked!r} now: {model!r}, before: {before}; "
                    f"{self._whose} says who answered it (answered_by)"
                )
            elif model != self._asked:
                yield f"{model!r} answers for {self._asked!r}, as the endpoint says"
            self._seen.add(model)
