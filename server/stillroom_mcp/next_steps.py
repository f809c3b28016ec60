"""The next step that each result suggests to an agent, such as the next call."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from pydantic import BaseModel

from stillroom import api, fences
from stillroom_mcp.outcomes import first_remark, last_step

_MAX_POLL_S = 110.0
_MAX_FILES_NAMED = 3
_STALE_MINUTES = 2
"""The age from which the report of a remote run is called old."""
_SMALL_STUDENT = 100_000_000
"""A student with fewer parameters is evaluated quickly on a CPU."""


def after_create_project(request: api.CreateProject, result: api.ProjectResult) -> str:
    """Suggests generating rollouts; for a starter project, first adding the user's own files."""
    if request.template == "starter":
        return (
            "put your prompts into prompts.jsonl (see CLAUDE.md) and your tools, if any, into "
            "tools.py (see tools_example.py), then call check_setup with your teacher's provider"
        )
    folder = "" if result.folder == "." else f"{result.folder}/"
    if request.template == "traces":
        return (
            f"import_rollouts(input={folder}traces, output={folder}rollouts/app.jsonl, "
            "split_heldout=0.25, prompts=true)"
        )
    own_files = " (first add your own prompts, tools and models, if you have them; see CLAUDE.md)"
    return (
        f"generate_rollouts(input={folder}prompts.jsonl, output={folder}rollouts/teacher.jsonl, "
        f"provider=demo, model=teacher, tools={folder}tools.py, rewards={folder}rewards.py, n=300, "
        "temperature=1.2, max_turns=5, max_tokens=48, concurrency=64)"
        + (own_files if request.template == "on-policy-agent" else "")
    )


def after_check_setup(request: api.CheckSetup, result: api.SetupReport) -> str:
    """Suggests the fixes for everything that is missing, or the first stage."""
    missing = [check.fix for check in result.checks if check.status == "missing" and check.fix]
    notes = [check.fix for check in result.checks if check.name == "model" and check.fix]
    if missing:
        return "first: " + "; ".join(dict.fromkeys([*missing, *notes]))
    if request.where is not None:
        return (
            f"plan_training(where={request.where}) forecasts memory, time and cost on it; then "
            "call start_training with the same arguments (generate_rollouts and evaluate_model "
            "also take where)"
        )
    return "; ".join(["run_recipe, create_project, or generate_rollouts with your prompts", *notes])


def after_list_machines(request: api.ListMachines, result: api.MachineList) -> str:
    """Suggests adding a machine, probing the machines, or what to do about their cost."""
    if not result.machines:
        return (
            "there is no machine: add one line to machines.yml, e.g. `gpu-box: {ssh: me@host, "
            "price_per_hour: 2.40}`, then check_setup(where=gpu-box)"
        )
    idle = [machine for machine in result.machines if machine.state == "up" and machine.problem]
    if idle:
        return f"tell the user that {idle[0].name} costs money without a run: see its problem"
    unreachable = [machine.name for machine in result.machines if machine.state == "unreachable"]
    if unreachable:
        return f"check_setup(where={unreachable[0]}) shows why it does not answer"
    first = result.machines[0].name
    if not request.check and all(machine.asked_at is None for machine in result.machines):
        return "list_machines(check=true) probes them; then plan_training(where=…) compares them"
    ssh_hosts = [machine for machine in result.machines if machine.kind == "ssh"]
    charged = [machine.name for machine in ssh_hosts if machine.spent_usd or machine.price_per_hour]
    cost = (
        f"; tell the user that {', '.join(charged)} costs money until they stop it, since "
        "stillroom did not provision it"
        if charged
        else ""
    )
    if any(machine.spent_usd for machine in result.machines):
        cost = f"; spent_usd counts only the runs of this workspace{cost}"
    return f"plan_training(where={first}) forecasts memory, time and cost on each machine{cost}"


def after_validate_dataset(request: object, result: api.ValidationReport) -> str:
    """Suggests fixing the bad rows, or the stage that reads this kind of file."""
    if result.bad:
        where = f" ({result.problems_file} lists all problems)" if result.problems_file else ""
        fix = f"fix the {result.bad} bad rows{where}, then validate_dataset again"
        if any(api.NEED_IMPORT in note for note in result.notes):
            return f"import_rollouts reads the files named in notes; else {fix}"
        return fix
    if result.left_out:
        return "training would leave out rows (see left_out): fix them, or choose another student"
    return (
        _notes_first(result.notes)
        + {
            "prompts": "generate_rollouts with this file as input; evaluate_model with it as data, "
            "if these prompts are held out",
            "rollouts": "filter_dataset, then convert_rollouts or make_dpo_pairs",
            "sft": "start_training with dataset_type sft and data.train_file set to this file",
            "dpo": "start_training with dataset_type dpo and data.train_file set to this file",
        }[result.format]
    )


def _notes_first(notes: list[str]) -> str:
    """Returns the advice to read the notes first, or "" without notes."""
    if not notes:
        return ""
    return "read the notes on unusual rows; if the rows are as you want them, "


def after_import_rollouts(request: object, result: api.ImportResult) -> str:
    """Suggests reading why rows were refused, then inspecting and converting the rollouts."""
    inspect = f"inspect_examples(path={result.output})"
    # Spans and traces around the calls are refused too, which loses nothing.
    lost = result.refused - result.refused_by_reason.get("no model call", 0)
    if lost > result.read / 10:
        inspect = f"read why {lost} rows were refused ({result.refused_file}), then {inspect}"
    if result.unread_files:
        names = ", ".join(map(fences.safe_name, result.unread_files[:_MAX_FILES_NAMED]))
        names += " and more" if len(result.unread_files) > _MAX_FILES_NAMED else ""
        inspect = f"nothing was read from {names}: see notes before you use the rows; {inspect}"
    notes = "; tell the user about the notes" if result.notes else ""
    use = f"filter_dataset and convert_rollouts(input={result.output})"
    if result.scores and not result.rewarded:
        use = f"import again with reward_from if one of the scores measures correctness; then {use}"
    elif "preferred" in result.scores:
        use = f"make_dpo_pairs(input={result.output})"
    step = f"{inspect}{notes}; then {use}"
    if result.heldout is not None and result.heldout.prompts is not None:
        evaluate = f"evaluate_model(data={result.heldout.prompts})"
        return f"{step}; {evaluate} measures the student before training"
    if result.prompts is not None:
        return f"{step}; or evaluate_model(data={result.prompts}) if they are to evaluate with"
    return step


def after_sample_for_review(request: object, result: api.ReviewSample) -> str:
    """Suggests that the user judges the sample, then filtering by the verdicts."""
    return (
        f"let the user judge the rows in {result.page} and download the verdicts (or set verdict "
        f"to keep or drop in {result.output}), then filter_dataset(input=<the rows that were "
        "sampled>, verdicts=<that file>)"
    )


def after_filter_dataset(request: object, result: api.FilterResult) -> str:
    """Suggests converting the rows that passed, or loosening a filter if none did."""
    if result.read == 0:
        return "the input has no rows: look at how it was made (show_lineage)"
    if result.kept == 0:
        return f"no row passed: look at {result.dropped_file} and loosen a filter"
    if result.warnings:
        level = "; decontaminate_level=contained keeps tasks that are only similar"
        is_near = result.contamination.get("near", 0) > result.read / 100
        return (
            f"first read some of these rows in {result.dropped_file} (it names the file:line that "
            f"each resembles): {result.warnings[0]}{level if is_near else ''}; if you agree, "
            f"convert_rollouts(input={result.output}, output=…/sft.jsonl)"
        )
    return (
        f"convert_rollouts(input={result.output}, output=…/sft.jsonl); if these already are SFT "
        "rows, start_training instead"
    )


def after_convert_rollouts(request: object, result: api.ConvertResult) -> str:
    """Suggests inspecting the supervised rows, then SFT."""
    return _notes_first(result.notes) + (
        f"inspect_examples(path={result.output}, model=<student>) to see what is trained, then "
        "start_training with dataset_type sft and data.train_file set to this file"
    )


def after_make_dpo_pairs(request: object, result: api.PairsResult) -> str:
    """Suggests DPO on the pairs, from the checkpoint that produced the rejected rollouts."""
    return _notes_first(result.notes) + (
        f"start_training with dataset_type dpo and data.train_file set to {result.output}; start "
        "from the checkpoint whose rollouts were rejected"
    )


def after_inspect_examples(request: object, result: api.ExamplesPage) -> str:
    """Suggests how to check the mask of trained tokens, or how to get the mask."""
    if any(example.problem for example in result.examples):
        return "validate_dataset lists every problem of the file"
    if all(example.num_tokens is None for example in result.examples):
        return "give model=<student> to see which tokens are trained"
    if result.html:
        return f"ask the user to open {result.html}, which highlights every trained token"
    return "check that ⟦ ⟧ encloses only the assistant's turns, each with its end-of-turn token"


def after_plan_training(request: object, result: api.TrainingForecast) -> str:
    """Suggests starting the training, or the changes that make it fit."""
    if not result.fits:
        others = [forecast.machine for forecast in result.machines[1:] if forecast.fits]
        elsewhere = f", or where={others[0]}, where it fits" if others else ""
        changes = "; or ".join(result.changes) or "a smaller model"
        return f"the training does not fit: call plan_training again with {changes}{elsewhere}"
    start = "start_training with the same config and overrides"
    if result.machines:
        start = f"{_price_notice(result)}{start}, where={result.machines[0].machine}"
    if result.skipped:
        return f"tell the user which rows are skipped, then {start}"
    return start


def _price_notice(result: api.TrainingForecast) -> str:
    """Returns what to tell or ask the user about the price before the start."""
    machine = result.machines[0]
    if machine.price_per_hour is None:
        return (
            f"the hourly price of {machine.machine} is unknown, so no budget can be enforced: ask "
            "the user, and set price_per_hour in machines.yml (0 if it costs nothing), then "
        )
    if machine.usd_most is None:
        return ""
    tools = " (without the time of tools)" if result.method == "distill" else ""
    minutes = machine.install_seconds / 60
    install = f", including up to {minutes:.0f} minutes for installing packages" if minutes else ""
    return (
        f"tell the user that it may cost up to ${machine.usd_most:.2f}{tools}{install}; "
        "only budget_usd limits the cost. Then, with budget_usd, "
    )


def after_run(request: object, result: api.RunReport) -> str:
    """Suggests waiting for an active run, the fix for a failed one, or the next stage."""
    if result.status in ("starting", "running"):
        then = f"; then the same for {', '.join(result.then)}" if result.then else ""
        following = f"get_run(run_id={result.run_id}, wait_s=110) until status is succeeded{then}"
        if result.unreachable is not None:
            return (
                f"{result.where} does not answer; `unreachable` says why. machine_usd has been an "
                "estimate since last_contact. Stillroom keeps retrying, so do not start the run "
                f"again. {following}. If {result.where} stays unreachable, follow the advice in "
                f"`unreachable` or call check_setup(where={result.where}). If the machine is gone "
                "for good, cancel_run says how to continue"
            )
        if result.alarms:
            advice = "tell the user about the alarms; cancel_run if they persist, otherwise "
            following = advice + following
        return _stale_note(result) + following
    if result.resumed_by is not None:
        return f"another run resumed this one: get_run(run_id={result.resumed_by})"
    if result.status != "succeeded":
        fix = result.error.fix if result.error else _resume_step(result)
        if result.where is not None:
            # The fix does not name the machine; without where, the run would resume here.
            argument = f"resume={result.run_id}"
            fix = fix.replace(f"{argument})", f"{argument}, where={result.where})")
        return f"{fix} (get_run_logs(run_id={result.run_id}) shows the details)"
    return _after_success(result)


def _stale_note(result: api.RunReport) -> str:
    """Returns a note if the report of a remote run is old, e.g. after a night offline."""
    try:
        passed = datetime.now(UTC) - datetime.fromisoformat(result.last_contact or "")
    except ValueError:
        return ""
    minutes = int(passed.total_seconds() // 60)
    if minutes < _STALE_MINUTES:
        return ""
    return (
        f"this report, with its cost, is {minutes} minutes old and is being updated: call again. "
    )


def _resume_step(result: api.RunReport) -> str:
    if result.kind in ("sft", "dpo", "distill"):
        where = f", where={result.where}" if result.where is not None else ""
        elsewhere = ", on this or another machine" if where else ""
        resume_call = f"start_training(resume={result.run_id}{where})"
        return f"{resume_call} resumes at its last checkpoint, if it has one{elsewhere}"
    if result.kind == "recipe":
        return "run_recipe with the same arguments resumes where it stopped"
    return "repeat the call if you still need the result"


def _after_success(result: api.RunReport) -> str:
    """Suggests the next stage after a run that succeeded."""
    outcome = result.result or {}
    if (large := large_result(result)) is not None:
        return _AFTER[api.operation_of_run(result.kind).name](None, large)
    if result.kind == "rollouts":
        if outcome.get("dry_run"):
            return "generate_rollouts without dry_run makes the calls; budget_usd caps the cost"
        if limit := outcome.get("stopped_by"):
            return f"{limit} was reached: the same call with a higher limit continues from here"
        if failed := outcome.get("failed"):
            same_call = f"generate_rollouts again with output={outcome['output']}"
            return f"{same_call}: it repeats only the {failed} failed rollouts"
        step = f"filter_dataset(input={outcome['output']}, …), then convert_rollouts"
        return first_remark(result.kind, outcome) + step
    if result.kind == "score":
        step = f"filter_dataset(input={outcome['output']}, …) filters by the new rewards"
        return first_remark(result.kind, outcome) + step
    if result.kind == "evaluate" and outcome.get("dry_run"):
        return "evaluate_model without dry_run makes the calls; budget_usd caps the cost"
    if result.kind == "evaluate":
        comparison = f"compare_evaluations(baseline=<run id>, candidates=[{result.run_id}])"
        return first_remark(result.kind, outcome) + comparison
    if (last := last_step(result.kind, outcome)) is not None:
        return last
    remarks = "the run ended with alarms, so check it closely: " if result.alarms else ""
    remarks += first_remark(result.kind, outcome)
    is_small = (outcome.get("parameters") or _SMALL_STUDENT) < _SMALL_STUDENT
    # The checkpoint is here: only a student that is slow on a CPU is worth the machine's price.
    where = f", where={result.where}" if result.where is not None and not is_small else ""
    return (
        f"{remarks}evaluate_model(provider=hf, model={result.run_id}, data=<held-out "
        f"prompts>{where}), then compare_evaluations with the base model; export_model writes the "
        "student to a folder"
    )


def after_compare_evaluations(request: api.CompareEvaluations, result: api.ComparisonReport) -> str:
    """Suggests what follows from the decision, the guard sets and the differences."""
    for comparison in result.comparisons:
        if (guard := comparison.guard) is None or not (guard.forgets or guard.over_calls):
            continue
        change = "answers other prompts worse" if guard.forgets else "calls tools unnecessarily"
        return (
            f"tell the user that {comparison.candidate} {change} (guard): mix rows like these "
            "into the training file, or train less (fewer epochs, a lower learning rate)"
        )
    if not request.candidates and result.decision is not None:
        return {
            "go": "generate_rollouts with the teacher, first with dry_run to see the price: ",
            "no_go": "do not distil this teacher into this student: ",
            "unclear": "do not decide yet: ",
        }[result.decision.verdict] + result.decision.because
    decided = f"{result.decision.because}; " if result.decision is not None else ""
    for comparison in result.comparisons:
        if not comparison.tasks_won and not comparison.tasks_lost:
            return (
                f"{decided}no task has a different result with {comparison.candidate}: it may have "
                "the baseline's weights, or have learnt nothing; look at its training (get_run)"
            )
        if comparison.tasks_unshared > comparison.tasks_shared:
            return (
                f"{decided}the baseline and {comparison.candidate} share only "
                f"{comparison.tasks_shared} tasks, and {comparison.tasks_unshared} are in one "
                "evaluation only: evaluate both on the same prompts"
            )
    if all(comparison.is_significant for comparison in result.comparisons):
        return (
            f"{decided}no interval over all tasks includes 0: the differences are real on tasks "
            "like these; for a group of tasks, see its own interval in by_group"
        )
    return f"{decided}a difference whose interval includes 0 may be chance: evaluate on more tasks"


def after_write_report(request: object, result: api.WrittenReport) -> str:
    """Suggests that the user opens the page."""
    return f"ask the user to open {result.output}, a single file that they can send to others"


def after_show_lineage(request: object, result: api.Lineage) -> str:
    """Suggests how to use a tagged version, handle changed inputs, or trace a row."""
    if result.tagged:
        return f"use {result.tagged} as an input instead of this file; its content never changes"
    if result.problems:
        return (
            "files have been changed or removed since they were used (see problems): repeat the "
            "steps with the current files, or use a tagged version (name@tag) as input"
        )
    if result.row:
        return "inspect_examples(path=<file>, start=<row>) shows a row of these files"
    return "show_lineage with row=<line or id> traces one row; with tag=v1.0 it keeps a copy"


def large_result(run: api.RunReport) -> msgspec.Struct | None:
    """Returns the result of an operation that became a run for large files; None for other runs."""
    operation = api.operation_of_run(run.kind)
    if run.result is None or not operation.may_become_run:
        return None
    return msgspec.convert(run.result, operation.result)


def after_list_runs(request: api.ListRuns, result: api.RunPage) -> str:
    """Suggests looking at a run, or starting the first one."""
    if result.unreadable and not result.runs:
        return "the folders in unreadable have no readable run.json: move them elsewhere"
    if not result.runs:
        return "there are no runs yet: generate_rollouts starts one"
    newest = result.runs[0]
    match newest.status:
        case "starting" | "running":
            return f"get_run(run_id={newest.run_id}, wait_s=110) waits for the newest run"
        case "failed" | "interrupted":
            return f"get_run(run_id={newest.run_id}) says what to do about the newest run"
        case _:
            return f"get_run(run_id={newest.run_id}) shows the newest run"


def after_get_run_logs(request: api.GetRunLogs, result: api.LogPage) -> str:
    """Suggests get_run, which returns the run's status."""
    return f"get_run(run_id={result.run_id}) returns the run's status"


def after_cancel_run(request: api.CancelRun, result: api.RunReport) -> str:
    """Suggests checking whether the run has stopped, and killing it if it has not."""
    if result.status in ("starting", "running"):
        if result.unreachable is not None:
            return _when_unreachable(result)
        return (
            f"get_run(run_id={result.run_id}, wait_s=20); if it is still running after 10 s, call "
            "cancel_run again to kill it"
        )
    return "the run has ended; its finished work is kept"


def _when_unreachable(result: api.RunReport) -> str:
    """Suggests what to do while a cancellation is queued because the machine does not answer."""
    if result.kind in ("sft", "dpo", "distill"):
        resume_call = f"start_training(resume={result.run_id})"
        alternative = (
            f"{resume_call}, with where for another machine, resumes from the last checkpoint here"
        )
    else:
        alternative = "max_hours limits how long it may still run there"
    return (
        f"cancellation is queued until {result.where} answers; tell the user that the run may cost "
        f"money until then. If that machine is gone for good: {alternative}"
    )


def poll_after_s(result: api.RunReport) -> float | None:
    """Returns the seconds to wait before the next get_run; None once the run has ended.

    That is half of the remaining time, between 1 and 110 s, or 2 s if that time is unknown.
    """
    if result.status not in ("starting", "running"):
        return None
    eta_s = result.progress.eta_s if result.progress else None
    return 2.0 if eta_s is None else max(1.0, min(_MAX_POLL_S, round(eta_s / 2, 1)))


_AFTER: dict[str, Callable[[Any, Any], str]] = {
    "create_project": after_create_project,
    "check_setup": after_check_setup,
    "list_machines": after_list_machines,
    "validate_dataset": after_validate_dataset,
    "import_rollouts": after_import_rollouts,
    "sample_for_review": after_sample_for_review,
    "filter_dataset": after_filter_dataset,
    "convert_rollouts": after_convert_rollouts,
    "make_dpo_pairs": after_make_dpo_pairs,
    "inspect_examples": after_inspect_examples,
    "plan_training": after_plan_training,
    "compare_evaluations": after_compare_evaluations,
    "list_runs": after_list_runs,
    "get_run_logs": after_get_run_logs,
    "cancel_run": after_cancel_run,
    "write_report": after_write_report,
    "show_lineage": after_show_lineage,
}
"""The next step after each operation that does not return the report of a run."""


def next_step(operation: api.Operation, request: BaseModel, result: msgspec.Struct) -> str:
    """Returns the next step after an operation."""
    return _AFTER.get(operation.name, after_run)(request, result)
