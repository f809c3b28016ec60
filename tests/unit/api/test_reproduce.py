"""The command that a run's request stands for is taken by the command line and means the same."""

import shlex
from typing import Any

import pytest

from stillroom.api.operations import operation_of_run
from stillroom.api.reports import command_of
from stillroom.run_folder import RunRequest
from stillroom.types import RunKind
from stillroom_mcp import cli

REQUESTS: list[tuple[RunKind, dict[str, Any]]] = [
    (
        RunKind.ROLLOUTS,
        {
            "input": "my prompts.jsonl",
            "output": "o.jsonl",
            "model": "m",
            "provider": "demo",
            "n": 3,
            "browse": False,
            "browse_allow": ["a.org", "b.org"],
        },
    ),
    (RunKind.SFT, {"config": "sft.yml", "overrides": ["trainer.seed=1", "data.batch_size=8"]}),
    (
        RunKind.EVALUATE,
        {"data": "heldout.jsonl", "model": "demo/student", "group_by": ["difficulty"]},
    ),
    (RunKind.EXPORT, {"model": "sft-a", "output": "exports/a"}),
    (RunKind.FILTER, {"input": "a.jsonl", "output": "b.jsonl", "min_reward": 0.5}),
]


@pytest.mark.parametrize(("kind", "given"), REQUESTS, ids=[kind for kind, _ in REQUESTS])
def test_the_command_asks_for_the_same(kind: RunKind, given: dict[str, Any]) -> None:

    model = operation_of_run(kind).request
    request = model.model_validate(given)
    document = RunRequest(kind=kind, workspace="/w", request=request.model_dump(mode="json"))
    words = shlex.split(command_of(document))
    parser, _ = cli.build_parser(words[1:])
    options = vars(parser.parse_args(words[1:]))
    read = {name: value for name, value in options.items() if name in model.model_fields}
    assert model.model_validate(read) == request
    assert len(words) <= 2 + 3 * len(given)
