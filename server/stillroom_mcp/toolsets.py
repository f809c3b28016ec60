"""Which of the tools a server offers: all, or named sets for agents with a short context."""

from collections.abc import Sequence

from stillroom.api import OPERATIONS, Operation

TOOLSETS: dict[str, tuple[str, ...]] = {
    "core": (
        "create_project",
        "generate_rollouts",
        "filter_dataset",
        "convert_rollouts",
        "start_training",
        "evaluate_model",
        "compare_evaluations",
        "get_run",
        "cancel_run",
    ),
    "data": (
        "validate_dataset",
        "import_rollouts",
        "score_rollouts",
        "sample_for_review",
        "filter_dataset",
        "convert_rollouts",
        "make_dpo_pairs",
        "inspect_examples",
        "show_lineage",
    ),
    "training": (
        "check_setup",
        "list_machines",
        "plan_training",
        "start_training",
        "evaluate_model",
        "compare_evaluations",
        "export_model",
    ),
    "runs": ("get_run", "list_runs", "get_run_logs", "cancel_run", "write_report"),
}
"""The tools of each set by its name."""
ALL = "all"


def chosen_operations(
    toolsets: Sequence[str] = (ALL,), *, is_read_only: bool = False
) -> list[Operation]:
    """Returns the operations of the named sets, in the usual order.

    With `is_read_only` only those that write nothing and start no run.
    """
    names = {name for chosen in toolsets if chosen != ALL for name in TOOLSETS[chosen]}
    return [
        operation
        for operation in OPERATIONS
        if (ALL in toolsets or operation.name in names)
        and (operation.is_read_only or not is_read_only)
    ]
