"""The names that other systems' command lines have for our commands and options.

Their short flags are taken as they are; a long one that has another name here is refused with ours.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

_BY_FIELD = {
    "n": "-n",
    "entries": "-e",
    "model": "-m",
    "tools": "-t",
    "input": "-i",
    "output": "-o",
    "concurrency": "-c",
    "system": "-s",
}
_OF_COMMAND = {
    "evaluate-model": {"temperature": "-t", "tools": None},
    "create-project": {"template": "-t"},
}
"""The short flags of single commands; None for a field that has none there."""
WORKSPACE_FLAGS = ("-d", "--dir")

_OVERRIDES = {
    ("-m", "--model"): "model.path",
    ("-e", "--epochs"): "trainer.num_epochs",
    ("-b", "--batch-size"): "data.batch_size",
    ("--lr", "--learning-rate"): "trainer.learning_rate",
    ("-n", "--name"): "project_name",
}
"""The flags of a training command, and the keys of config.yml that they set."""
SHORT_OVERRIDES = "short_overrides"
"""The attribute of parsed options with the overrides that these flags stand for."""

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
"""The commands of a hosted service's account; there is none here."""

OPTIONS = {
    "--num": "--n",
    "--num-rollouts": "--n",
    "--max-samples": "--n",
    "--entry": "--entries",
    "--all": "no --n and no --entries: all prompts are the default",
    "--samples": "--samples-per-prompt",
    "--timeout": "--request-timeout",
    "--reasoning-mode": "--reasoning-effort",
    "--mcp-url": "--mcp-servers",
    "--max-billing": "--budget-usd",
    "--max-context-window": "--max-tokens, of one turn (the model's context bounds the rest)",
    "--pass1": "--samples-per-prompt 1, the default",
    "--no-pass1": "--samples-per-prompt 4 or 8, which give pass@1 too",
    "--pass4": "--samples-per-prompt 4",
    "--pass8": "--samples-per-prompt 8",
    "--pass1-temp": "--temperature",
    "--pass4-temp": "--temperature",
    "--pass8-temp": "--temperature",
    "--eval-id": "the file of held-out prompts, as the first argument",
    "--project-id": "--workspace, the project's folder",
    "--save-model": "nothing: cancel-run writes a checkpoint first",
    "--filter-success": "nothing: without --include-failed only successes are converted",
    "--api-url": "nothing: there is no account",
    "--keep-archive": "nothing: export-model writes a folder",
    "--debug": "plan-training, which starts nothing",
    "--verbose": "inspect-examples, which shows the rollouts",
    "--force": "nothing: there is no account",
    "--yes": "nothing: no question is asked",
    "-y": "nothing: no question is asked",
    "-f": "nothing: there is no account",
}
"""What to write here for options that other systems have."""


def short_flag(command: str, field: str) -> str | None:
    """Returns the short flag of a field of a command; None if it has none."""
    return _OF_COMMAND.get(command, {}).get(field, _BY_FIELD.get(field))


def hint_for_option(given: str) -> str:
    """Returns " (here: …)" for an option of another system, or ""."""
    ours = OPTIONS.get(given.partition("=")[0])
    return f" (here: {ours})" if ours is not None else ""


def hint_for_command(given: str) -> str:
    """Returns " (here: …)" for a command of another system, or ""."""
    if given in NO_ACCOUNT:
        return " (here: nothing to do, since all runs on your own machine without an account)"
    return f" (here: {COMMANDS[given]})" if given in COMMANDS else ""


class JoinedEntries(argparse.Action):
    """Joins repeated flags with commas: `-e 0 -e 2` is `-e 0,2`."""

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
    """Keeps a flag's value as an override of config.yml; `const` is the key."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Adds the override that the flag's value is short for."""
        before: list[str] = getattr(namespace, SHORT_OVERRIDES, None) or []
        setattr(namespace, SHORT_OVERRIDES, [*before, f"{self.const}={values}"])


def add_override_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a training command that stand for overrides of config.yml."""
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


def with_short_overrides(given: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Returns a training command's fields with the overrides that its flags stand for.

    A first argument such as `data.batch_size=8` is an override of config.yml, not its name.
    """
    fields, config = dict(given), str(given.get("config", ""))
    first: list[str] = []
    if "=" in config and not config.endswith((".yml", ".yaml", ".json")):
        first = [fields.pop("config")]
    more: Sequence[str] = getattr(options, SHORT_OVERRIDES, None) or ()
    if first or more:
        fields["overrides"] = [*first, *given.get("overrides", ()), *more]
    return fields
