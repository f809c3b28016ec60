"""Whole rollout runs in this process, against a handler that stands for all endpoints."""

from typing import Any

from fakes.chat_endpoint import Handler, serve
from fakes.reporters import KeptReporter
from fakes.waiting import run_async
from stillroom.rollout.journal.shards import RunPart
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.run import generate_rollouts
from stillroom.settings import Workspace

GIVEN = {
    "input": "prompts.jsonl",
    "output": "out.jsonl",
    "model": "m",
    "provider": "openai",
    "base_url": "http://teacher.test/v1",
    "concurrency": 1,
}


class PowerCutError(OSError):
    """Ends a run in the middle of a call, as no failure of an endpoint does."""


def run_rollouts(
    workspace: Workspace,
    handler: Handler,
    reporter: KeptReporter | None = None,
    part: RunPart | None = None,
    **changes: Any,
) -> Any:
    """Returns the result of a run with these options; its folder is runs/run."""

    async def main() -> Any:
        async with serve(handler):
            return await generate_rollouts(
                workspace,
                GenerateRollouts(**{**GIVEN, **changes}),
                folder=workspace.runs / "run",
                reporter=reporter or KeptReporter(),
                part=part,
            )

    return run_async(main)
