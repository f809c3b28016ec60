"""A student is measured, and its rows are looked at, with the template that it is trained with."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fakes.base_models import save_base, with_chatml
from fakes.conversations import answer, user
from fakes.http_endpoint import ScriptedEndpoint
from fakes.judges import judgement
from fakes.reporters import KeptReporter
from fakes.rollout_rows import read_rows, write_rows
from fakes.tiny_models import TinyModels
from fakes.training import make_student
from fakes.waiting import run_async
from stillroom import api
from stillroom.curate.filter.request import FilterDataset
from stillroom.data.chat.template import template_file
from stillroom.data.inspect import InspectExamples
from stillroom.data.validate import ValidateDataset
from stillroom.errors import ConfigError, EngineError, InputError, ModelError, RunCancelledError
from stillroom.evaluate.files import EvaluationResult
from stillroom.evaluate.request import EvaluateModel, plan_evaluation
from stillroom.evaluate.run import evaluate_model
from stillroom.files import read_json, write_json
from stillroom.jobs.child_work import filter_rows
from stillroom.rollout.journal.journal import journal_folder
from stillroom.rollout.plan import output_settings, plan_generation
from stillroom.rollout.request import GenerateRollouts
from stillroom.rollout.run import generate_rollouts
from stillroom.run_folder import create_run
from stillroom.settings import Workspace
from stillroom.train.loop.checkpoints import save_checkpoint
from stillroom.types import RunKind


@pytest.fixture
def workspace(
    tmp_path: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> Workspace:
    """A base model, prompts and rows; the process runs in another folder, as a server may."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    root = tmp_path / "work"
    save_base(tiny_models, root / "base")
    prompts = [{"prompt": f"{n}?", "metadata": {"expected_answer": "7"}} for n in range(4)]
    write_rows(root / "prompts.jsonl", prompts)
    write_rows(root / "rows.jsonl", [{"messages": [user("Price?"), answer("It costs 12.")]}])
    (root / "mine.jinja").write_text(template_file("llama3").read_text("utf-8"), "utf-8")
    return Workspace(root)


def evaluated(
    workspace: Workspace, number: int, reporter: KeptReporter | None = None, **fields: Any
) -> Any:
    request = EvaluateModel(**{"data": "prompts.jsonl", "max_tokens": 8, **fields})
    folder = workspace.runs / f"evaluate-{number}"
    folder.mkdir(parents=True)

    async def run() -> EvaluationResult | object:
        with anyio.fail_after(60):
            return await evaluate_model(
                workspace, request, folder=folder, reporter=reporter or KeptReporter()
            )

    return anyio.run(run)


def test_a_base_model_is_measured_with_a_template_as_if_it_were_its_own(workspace):
    with_chatml(workspace.root / "base", workspace.root / "instruct")
    measured = {"teacher": "instruct", "kl_prompts": 2}
    with pytest.raises(ModelError, match="has no chat template") as caught:
        evaluated(workspace, 1, model="base", **measured)
    assert "set chat_template" in caught.value.fix

    result = evaluated(workspace, 2, model="base", chat_template="chatml", **measured)
    evaluated(workspace, 3, model="instruct", **measured)

    rows, expected = (read_rows(workspace.runs / f"evaluate-{n}/rollouts.jsonl") for n in (2, 3))
    assert [row["messages"] for row in rows] == [row["messages"] for row in expected]
    assert [row["tokens"]["ids"] for row in rows] == [row["tokens"]["ids"] for row in expected]
    assert result.teacher_kl.value == pytest.approx(0.0, abs=1e-6)
    assert rows[0]["teacher"]["chat_template"] == "chatml"
    assert "chat_template" not in expected[0]["teacher"]


def test_a_template_without_an_end_that_the_model_knows_is_refused_as_in_training(workspace):
    text = template_file("chatml").read_text("utf-8").replace("<|im_end|>", "<|done|>")
    (workspace.root / "mine.jinja").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"^chat_template 'mine.jinja' ends an answer with"):
        evaluated(workspace, 1, model="base", chat_template="mine.jinja")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"chat_template": "chatmll"}, "^chat_template 'chatmll': there is no model"),
        ({"chat_template": "none.jinja"}, "^chat_template 'none.jinja' does not exist"),
        (
            {"chat_template": "chatml", "base_url": "http://localhost/v1"},
            "an endpoint uses its own",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_before_the_run(workspace, fields, problem):
    request = EvaluateModel.model_validate({"data": "prompts.jsonl", "model": "base", **fields})
    with pytest.raises(EngineError, match=problem):
        plan_evaluation(workspace, request)


def test_a_template_file_shapes_an_output_by_its_content(workspace):
    request = GenerateRollouts(input="prompts.jsonl", model="base", chat_template="mine.jinja")
    plan = plan_generation(workspace, request)
    before = output_settings(plan.rollouts, None)

    assert plan.rollouts.inputs[1] == workspace.root / "mine.jinja"
    (workspace.root / "mine.jinja").write_text("other", "utf-8")
    assert output_settings(plan.rollouts, None) != before


def test_an_output_is_not_continued_with_another_template_of_the_same_model(workspace):
    with_chatml(workspace.root / "base", workspace.root / "instruct")
    fields = {"input": "prompts.jsonl", "model": "base", "max_tokens": 4}
    request = GenerateRollouts.model_validate({**fields, "chat_template": "instruct"})

    def generated(n: int) -> Any:
        folder = create_run(workspace, RunKind.ROLLOUTS, {}).path
        changed = request.model_copy(update={"n": n})
        return run_async(
            partial(generate_rollouts, workspace, changed, folder=folder, reporter=KeptReporter())
        )

    generated(1)
    assert generated(2).already_done == 1
    file = workspace.root / "instruct" / "chat_template.jinja"
    file.write_text(f"{{#- another -#}}{file.read_text('utf-8')}", "utf-8")
    with pytest.raises(InputError, match="chat_templates was"):
        generated(3)
    # Earlier versions did not record it.
    settings = journal_folder(workspace.root / request.output) / "settings.json"
    recorded = read_json(settings, dict[str, Any])
    write_json(settings, {k: v for k, v in recorded.items() if k != "chat_templates"})
    assert generated(3).already_done == 2


def test_rows_are_shown_checked_and_filtered_with_the_template_of_the_training(workspace):
    student = {"model": "base", "chat_template": "mine.jinja"}

    page = api.inspect_examples(workspace, InspectExamples(path="rows.jsonl", **student))

    [example] = page.examples
    assert "<|end_header_id|>\n\n⟦It costs 12.<|eot_id|>⟧" in example.text
    request = ValidateDataset(path="rows.jsonl", report="none", **student)
    report = api.validate_dataset(workspace, request)
    assert report.tokens is not None
    assert report.tokens.high == example.num_tokens
    limit = {"input": "rows.jsonl", "output": "kept.jsonl", **student}
    for max_tokens, kept in ((example.num_tokens - 1, 0), (example.num_tokens, 1)):
        result = filter_rows(workspace, FilterDataset(**limit, max_tokens=max_tokens))
        assert result.kept == kept


def test_a_template_of_no_student_is_refused(workspace):
    request = InspectExamples(path="rows.jsonl", chat_template="chatml")
    with pytest.raises(InputError, match="chat_template needs model"):
        api.inspect_examples(workspace, request)


class JudgingEndpoint(ScriptedEndpoint):
    """A judge for whom each answer is right."""

    def answer(self, body: dict[str, Any]) -> tuple[tuple[str, int], dict[str, Any]]:
        key, reply = super().answer(body)
        reply["choices"][0]["message"] = {"role": "assistant", "content": judgement(1)}
        reply["usage"] = {"prompt_tokens": 10, "completion_tokens": 10}
        return key, reply


def test_the_cost_of_a_local_models_judge_is_known_while_it_runs_and_paid_once(
    workspace: Workspace,
) -> None:
    (workspace.root / "prices.yml").write_text("judge: {input: 1000, output: 1000}\n", "utf-8")
    with_chatml(workspace.root / "base", workspace.root / "instruct")

    with JudgingEndpoint() as endpoint:
        judge = {"model": "judge", "base_url": endpoint.base_url, "rubric": "Be right."}
        (workspace.root / "judge.yml").write_text(json.dumps(judge), "utf-8")
        endpoint.hold_after(1)
        first = KeptReporter(lambda: endpoint.num_asked == 2)
        with pytest.raises(RunCancelledError):
            evaluated(workspace, 1, first, model="instruct", judge="judge.yml", concurrency=1)
        (workspace.runs / "evaluate-1" / "run.json").touch()
        endpoint.hold.set()
        second = KeptReporter()
        result = evaluated(workspace, 2, second, model="instruct", judge="judge.yml")
        assert endpoint.num_asked == 2 + 3

    assert first.measured == [{"cost_usd": pytest.approx(0.02)}]
    assert result.reused == 1
    assert result.cost_usd == pytest.approx(3 * 0.02)
    assert second.measured[-1]["cost_usd"] == pytest.approx(result.cost_usd)


def test_answers_with_another_template_are_not_reused(workspace: Workspace) -> None:
    def has_answered() -> bool:
        return bool(reporter.progressed)

    reporter = KeptReporter(has_answered)
    options = {"model": "base", "concurrency": 1, "chat_template": "chatml"}
    with pytest.raises(RunCancelledError):
        evaluated(workspace, 1, reporter, **options)
    (workspace.runs / "evaluate-1" / "run.json").touch()

    assert evaluated(workspace, 2, **options | {"chat_template": "llama3"}).reused == 0
    assert evaluated(workspace, 3, **options).reused > 0


def test_answers_of_an_adapter_are_not_reused_on_another_base(
    workspace: Workspace, tiny_models: TinyModels
) -> None:
    def has_answered() -> bool:
        return bool(reporter.progressed)

    base = workspace.root / "instruct"
    with_chatml(workspace.root / "base", base)
    run = workspace.runs / "trained"
    run.mkdir(parents=True)
    (run / "run.json").touch()
    student = make_student(tiny_models, base, rank=2)
    save_checkpoint(run, student, method="sft", step=1, is_final=True)
    reporter = KeptReporter(has_answered)
    options = {"model": "trained", "concurrency": 1}
    with pytest.raises(RunCancelledError):
        evaluated(workspace, 1, reporter, **options)
    (workspace.runs / "evaluate-1" / "run.json").touch()

    config = (base / "config.json").read_text("utf-8")
    (base / "config.json").write_text(config + "\n", "utf-8")
    assert evaluated(workspace, 2, **options).reused == 0
    (base / "config.json").write_text(config, "utf-8")
    assert evaluated(workspace, 3, **options).reused > 0
