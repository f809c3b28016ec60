"""The flags and commands of other systems' command lines."""

from typing import Any

import pytest

from stillroom_mcp.cli import build_parser
from stillroom_mcp.other_names import (
    COMMANDS,
    NO_ACCOUNT,
    OPTIONS,
    SHORT_OVERRIDES,
    with_short_overrides,
)


def parsed(text: str) -> dict[str, Any]:
    """The fields of the request that a command line stands for."""
    given = text.split()
    parser, _ = build_parser(given)
    options = parser.parse_args(given)
    apart = ("command", "json", "detach", SHORT_OVERRIDES)
    fields = {k: v for k, v in vars(options).items() if k not in apart and v is not None}
    return with_short_overrides(fields, options)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (
            ("generate-rollouts prompts.jsonl -m openai/gpt-4o -t tools.py -o train.jsonl -s Hi "
            "-n 5 -c 10 --max-turns 15"),
            {"input": "prompts.jsonl", "model": "openai/gpt-4o", "tools": "tools.py",
             "output": "train.jsonl", "system": "Hi", "n": "5", "concurrency": "10",
             "max_turns": "15"},
        ),
        (
            "generate-rollouts -i prompts.txt -m m -t none -d project",
            {"input": "prompts.txt", "model": "m", "tools": "none", "workspace": "project"},
        ),
        ("generate-rollouts p -m m -e 0,2,5", {"input": "p", "model": "m", "entries": "0,2,5"}),
        ("generate-rollouts p -m m -e 0 -e 2", {"input": "p", "model": "m", "entries": "0,2"}),
        (
            "evaluate-model heldout.jsonl -m sft-1 -n 50 -t 0.8",
            {"data": "heldout.jsonl", "model": "sft-1", "n": "50", "temperature": "0.8"},
        ),
        (
            "start-training config.yml -m Qwen/Qwen3-4B -e 3 -b 8 --lr 0.0002 -n mine",
            {"config": "config.yml", "overrides": [
                "model.path=Qwen/Qwen3-4B", "trainer.num_epochs=3", "data.batch_size=8",
                "trainer.learning_rate=0.0002", "project_name=mine"]},
        ),
        (
            "plan-training config.yml rollout.max_turns=5 -e 1",
            {"config": "config.yml",
             "overrides": ["rollout.max_turns=5", "trainer.num_epochs=1"]},
        ),
        (
            "start-training data.batch_size=8 trainer.num_epochs=2",
            {"overrides": ["data.batch_size=8", "trainer.num_epochs=2"]},
        ),
        ("create-project here -t starter", {"path": "here", "template": "starter"}),
        ("convert-rollouts rollouts -o t.jsonl --include-failed",
         {"input": ["rollouts"], "output": "t.jsonl", "include_failed": True}),
        ("export-model sft-1 -o out", {"model": "sft-1", "output": "out"}),
    ],
)  # fmt: skip
def test_short_flags_of_other_systems_mean_the_same(given: str, fields: dict[str, Any]) -> None:
    assert parsed(given) == fields


@pytest.mark.parametrize("name", [*COMMANDS, *NO_ACCOUNT])
def test_a_command_of_another_system_is_answered_with_ours(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(name)

    hint = f"(here: {COMMANDS[name]}" if name in COMMANDS else "(not needed here"
    assert hint in capsys.readouterr().err


def test_an_option_of_another_system_is_answered_with_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, by_command = build_parser()
    ours = {flag for parser in by_command.values() for flag in parser._option_string_actions}
    for name, hint in OPTIONS.items():
        with pytest.raises(SystemExit):
            by_command["generate-rollouts"].error(f"unrecognized arguments: {name} 5")
        assert f"(here: {hint}" in capsys.readouterr().err
        assert not hint.startswith("--") or hint.split(" ")[0].rstrip(",") in ours
