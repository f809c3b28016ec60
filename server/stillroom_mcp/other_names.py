"""Names that the CLIs of other systems use for stillroom's commands and options.

Their short flags are accepted; a long flag with another name here is refused with a hint.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

_SHORT_FLAGS = {
    "n": "-n",
    "entries": "-e",
    "model": "-m",
    "tools": "-t",
    "input": "-i",
    "output": "-o",
    "concurrency": "-c",
    "system": "-s",
}
_SHORT_FLAGS_OF_COMMAND = {
    "evaluate-model": {"temperature": "-t", "tools": None},
    "create-project": {"template": "-t"},
}
"""Short flags that differ for single commands; None for a field without a short flag."""
WORKSPACE_FLAGS = ("-d", "--dir")

_OVERRIDES = {
    ("-m", "--model"): "model.path",
    ("-e", "--epochs"): "trainer.num_epochs",
    ("-b", "--batch-size"): "data.batch_size",
    ("--lr", "--learning-rate"): "trainer.learning_rate",
    ("-n", "--name"): "project_name",
}
"""Flags of the training commands, and the keys of config.yml that they override."""
SHORT_OVERRIDES = "short_overrides"
"""The attribute of the parsed options that holds the overrides of these flags."""

COMMANDS = {
    "run": "start-training",
    "train": "start-training",
    "test": "generate-rollouts",
    "rollout": "generate-rollouts",
    "eval": "evaluate-model",
    "init": "create-project",
    "status": "list-runs",
    "stop": "cancel-run",
    "download": "export-model",
}
NO_ACCOUNT = ("login", "logout", "orgs")
"""Commands for the account of a hosted service, which stillroom does not need."""

OPTIONS = {
    "--num": "--n",
    "--num-rollouts": "--n",
    "--max-samples": "--n",
    "--entry": "--entries",
    "--all": "leave out --n and --entries; all prompts are the default",
    "--samples": "--samples-per-prompt",
    "--timeout": "--request-timeout",
    "--reasoning-mode": "--reasoning-effort",
    "--mcp-url": "--mcp-servers",
    "--max-billing": "--budget-usd",
    "--max-context-window": "--max-tokens (per turn; the model's context limits the conversation)",
    "--pass1": "--samples-per-prompt 1, the default",
    "--no-pass1": "--samples-per-prompt 4 or 8, which also give pass@1",
    "--pass4": "--samples-per-prompt 4",
    "--pass8": "--samples-per-prompt 8",
    "--pass1-temp": "--temperature",
    "--pass4-temp": "--temperature",
    "--pass8-temp": "--temperature",
    "--eval-id": "the file of held-out prompts, as the first argument",
    "--project-id": "--workspace, the project's folder",
    "--save-model": "not needed: cancel-run writes a checkpoint first",
    "--filter-success": "not needed: without --include-failed, only successes are converted",
    "--api-url": "not needed: there is no account",
    "--keep-archive": "not needed: export-model writes a folder",
    "--debug": "plan-training, which starts nothing",
    "--verbose": "inspect-examples, which shows the rollouts",
    "--force": "not needed: there is no account",
    "--yes": "not needed: no question is asked",
    "-y": "not needed: no question is asked",
    "-f": "not needed: there is no account",
}
"""The counterparts of options that other systems have."""


def short_flag(command: str, field: str) -> str | None:
    """Returns the short flag of a command's field, or None."""
    return _SHORT_FLAGS_OF_COMMAND.get(command, {}).get(field, _SHORT_FLAGS.get(field))


def hint_for_option(option: str) -> str:
    """Returns " (here: …)" for an option of another system, or ""."""
    counterpart = OPTIONS.get(option.partition("=")[0])
    return f" (here: {counterpart})" if counterpart is not None else ""


def hint_for_command(command: str) -> str:
    """Returns " (here: …)" for a command of another system, or ""."""
    if command in NO_ACCOUNT:
        return " (not needed here: stillroom runs on your own machine, without an account)"
    return f" (here: {COMMANDS[command]})" if command in COMMANDS else ""


class JoinedEntries(argparse.Action):
    """Joins repeated flags with commas: `-e 0 -e 2` means `-e 0,2`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Adds the flag's value to the values before it."""
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


class _Override(argparse.Action):
    """Stores a flag's value as an override of config.yml; `const` is the key."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Adds the override for the flag's value."""
        before: list[str] = getattr(namespace, SHORT_OVERRIDES, None) or []
        setattr(namespace, SHORT_OVERRIDES, [*before, f"{self.const}={values}"])


def add_override_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a training command that override keys of config.yml."""
    for flags, key in _OVERRIDES.items():
        parser.add_argument(
            *flags,
            action=_Override,
            const=key,
            dest=SHORT_OVERRIDES,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=f"the override {key}=VALUE",
        )


def with_short_overrides(
    parsed_fields: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Returns a training command's fields, with the overrides that its flags set.

    A first argument such as `data.batch_size=8` is an override, not the path of a config.
    """
    fields, config = dict(parsed_fields), str(parsed_fields.get("config", ""))
    positional: list[str] = []
    if "=" in config and not config.endswith((".yml", ".yaml", ".json")):
        positional = [fields.pop("config")]
    from_flags: Sequence[str] = getattr(options, SHORT_OVERRIDES, None) or ()
    if positional or from_flags:
        fields["overrides"] = [*positional, *parsed_fields.get("overrides", ()), *from_flags]
    return fields
