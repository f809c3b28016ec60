"""The next call to make after each operation, in words an agent can act on."""

from stillroom import api

_MAX_POLL_S = 50.0


def after_create_project(request: api.CreateProject, result: api.ProjectResult) -> str:
    """What to do with a new project."""
    if request.template == "starter":
        return (
            "put your prompts into prompts.jsonl and your tools into tools.py, then "
            "check_setup with your teacher's provider"
        )
    folder = "" if result.folder == "." else f"{result.folder}/"
    own = " (first your own prompts, tools and models, if you have them: CLAUDE.md)"
    return (
        f"generate_rollouts(input={folder}prompts.jsonl, output={folder}rollouts/teacher.jsonl, "
        f"provider=demo, model=teacher, tools={folder}tools.py, rewards={folder}rewards.py, n=300, "
        "temperature=1.2, max_turns=5, max_tokens=48, concurrency=64)"
        + (own if request.template == "on-policy-agent" else "")
    )


def after_check_setup(request: api.CheckSetup, result: api.SetupReport) -> str:
    """What to do once the machine is known."""
    missing = [check.fix for check in result.checks if check.status == "missing" and check.fix]
    if missing:
        return "first: " + "; ".join(missing)
    return "create_project, or generate_rollouts with your own prompts"


def after_validate_dataset(request: api.ValidateDataset, result: api.ValidationReport) -> str:
    """What to do with a checked file."""
    if result.bad:
        where = f" ({result.problems_file} has all problems)" if result.problems_file else ""
        return f"mend the {result.bad} bad rows{where}, then validate_dataset again"
    if result.left_out:
        return "training would leave rows out (see left_out): mend them, or choose another student"
    return {
        "prompts": "generate_rollouts with this file as input",
        "rollouts": "filter_dataset, then convert_rollouts or make_dpo_pairs",
        "sft": "start_training with dataset_type sft and data.train_file set to this file",
        "dpo": "start_training with dataset_type dpo and data.train_file set to this file",
    }[result.format]


def after_sample_for_review(request: api.SampleForReview, result: api.ReviewSample) -> str:
    """Who judges, and what becomes of it."""
    return (
        f"let the user judge in {result.page} and download the verdicts (or fill in verdict in "
        f"{result.output}: keep or drop), then filter_dataset(input={request.input}, "
        "verdicts=<that file>)"
    )


def after_filter_dataset(request: api.FilterDataset, result: api.FilterResult) -> str:
    """What to do with filtered rollouts."""
    if result.kept == 0:
        return f"nothing passed: look at {result.dropped_file} and loosen a filter"
    return (
        f"convert_rollouts(input={result.output}, output=…/sft.jsonl); rows that are supervised "
        "already are ready for start_training"
    )


def after_convert_rollouts(request: api.ConvertRollouts, result: api.ConvertResult) -> str:
    """What to do with supervised rows."""
    return (
        f"inspect_examples(path={result.output}, model=<student>) to see what is trained, then "
        "start_training with dataset_type sft and data.train_file set to it"
    )


def after_make_dpo_pairs(request: api.MakeDpoPairs, result: api.PairsResult) -> str:
    """What to do with pairs."""
    return (
        f"start_training with dataset_type dpo and data.train_file set to {result.output}; start "
        "from the checkpoint whose rollouts were rejected"
    )


def after_inspect_examples(request: api.InspectExamples, result: api.ExamplesPage) -> str:
    """What to look for."""
    if any(example.problem for example in result.examples):
        return "validate_dataset lists every problem of the file"
    if request.model is None:
        return "give model=<student> to see which tokens are trained"
    if result.html:
        return f"let a person open {result.html}: what is trained is highlighted, token by token"
    return "only the assistant's turns with their end-of-turn token must stand in ⟦ ⟧"


def after_plan_training(request: api.PlanTraining, result: api.TrainingForecast) -> str:
    """Whether to start, or what to change first."""
    if not result.fits:
        return f"it does not fit: plan_training again with {'; or '.join(result.changes)}"
    if result.skipped:
        return "tell the user which rows are left out (skipped), then start_training"
    return "start_training with the same config and overrides"


def after_run(request: object, result: api.RunReport) -> str:
    """What to do with a run as it stands."""
    if result.status in ("starting", "running"):
        then = f"; then the same for {', '.join(result.then)}" if result.then else ""
        following = f"get_run(run_id={result.run_id}, wait_s=50) until status is succeeded{then}"
        if result.alarms:
            return f"tell the user of the alarms, and cancel_run if they stay; else {following}"
        return following
    if result.status != "succeeded":
        fix = result.error.fix if result.error else _go_on(result)
        return f"{fix} (get_run_logs(run_id={result.run_id}) shows the details)"
    return _after_success(result)


def _go_on(result: api.RunReport) -> str:
    if result.kind in ("sft", "dpo", "distill"):
        return f"start_training(resume={result.run_id}) goes on from its last checkpoint"
    return "start it again if you want it to go on"


def _after_success(result: api.RunReport) -> str:
    outcome = result.result or {}
    if result.kind == "rollouts":
        if outcome.get("dry_run"):
            return "generate_rollouts without dry_run makes the calls; budget_usd caps the cost"
        if limit := outcome.get("stopped_by"):
            return f"{limit} was reached: the same call with a higher one goes on from here"
        if failed := outcome.get("failed"):
            again = f"generate_rollouts again with output={outcome['output']}"
            return f"{again}: only the {failed} failed rollouts are done again"
        return f"filter_dataset(input={outcome['output']}, …), then convert_rollouts"
    if result.kind == "score":
        return f"filter_dataset(input={outcome['output']}, …) selects by the new rewards"
    if result.kind == "evaluate":
        return f"compare_evaluations(baseline=<run id>, candidates=[{result.run_id}])"
    if result.kind == "export":
        serve = f"; serve it: {outcome['serve']}" if outcome.get("serve") else ""
        return f"tell the user of the warnings, and read {outcome['card']}{serve}"
    doubt = "it ended with alarms, so look closely: " if result.alarms else ""
    return (
        f"{doubt}evaluate_model(provider=hf, model={result.run_id}, data=<held-out prompts>), then "
        "compare_evaluations with the model it started from; export_model writes it for others"
    )


def after_compare_evaluations(request: api.CompareEvaluations, result: api.ComparisonReport) -> str:
    """How to read a comparison."""
    if all(comparison.is_significant for comparison in result.comparisons):
        return "every interval leaves out 0: the differences are real on tasks like these"
    return "where the interval holds 0 the tasks do not show a difference: evaluate on more of them"


def after_show_lineage(request: api.ShowLineage, result: api.Lineage) -> str:
    """What to do with a lineage."""
    if result.tagged:
        return f"give {result.tagged} wherever this file is an input; it never changes"
    if result.problems:
        return (
            "what changed since is not what was trained on: make it again from the files as they "
            "are now, or give a kept version (name@tag) as input"
        )
    if result.row:
        return "inspect_examples(path=<file>, start=<row>) shows a row of these files"
    return "row=<line or id> follows one row; tag=<v1.0> keeps the file under that name"


def after_list_runs(request: api.ListRuns, result: api.RunPage) -> str:
    """What to do with the list."""
    if not result.runs:
        return "there are no runs yet: generate_rollouts starts one"
    return "get_run(run_id=…) shows one of them"


def after_get_run_logs(request: api.GetRunLogs, result: api.LogPage) -> str:
    """What to do with the log."""
    return f"get_run(run_id={result.run_id}) says how the run stands"


def after_cancel_run(request: api.CancelRun, result: api.RunReport) -> str:
    """What to do once a run was asked to stop."""
    if result.status in ("starting", "running"):
        return (
            f"get_run(run_id={result.run_id}, wait_s=20); if it still runs after 10 s, call "
            "cancel_run again to kill it"
        )
    return "what the run had done is kept in its folder"


def poll_after_s(result: api.RunReport) -> float | None:
    """When it is worth looking again: about half of what is left, at most 50 s."""
    if result.status not in ("starting", "running"):
        return None
    eta_s = result.progress.eta_s if result.progress else None
    return 2.0 if eta_s is None else max(1.0, min(_MAX_POLL_S, round(eta_s / 2, 1)))
