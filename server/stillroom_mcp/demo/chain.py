"""The stages of the demo, in the order of a real distillation."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stillroom_mcp.demo.guide import Guide
from stillroom_mcp.demo.settings import ACTING, DemoSettings

PROMPTS, HELDOUT = "prompts.jsonl", "heldout.jsonl"
TEACHER_ROLLOUTS = "rollouts/teacher.jsonl"
GOOD_ROLLOUTS = "rollouts/teacher-good.jsonl"
LABELS, SOFT, ON_POLICY = "SFT, tokens", "SFT, soft", "on-policy"
"""The students of the demo, by their names in the table of results."""


@dataclass(slots=True)
class Evaluations:
    """The evaluations that the demo has started; each runs beside the stage that follows it."""

    run_ids: dict[str, str] = field(default_factory=dict[str, str])
    """The evaluations' run ids, by the model's name in the table of results."""


async def run_chain(guide: Guide, settings: DemoSettings, seed: int) -> Evaluations:
    """Runs all stages and returns the evaluations started on the way, in the stages' order."""
    evaluations = Evaluations()
    await _prepare(guide, seed)
    await _evaluate(guide, evaluations, settings, "teacher", "demo/teacher", seed)
    await _evaluate(guide, evaluations, settings, "base student", "demo/student", seed)
    await _teacher_rollouts(guide, settings, seed)
    await _curate(guide)
    labels, soft = await _sft(guide, seed)
    await _evaluate(guide, evaluations, settings, LABELS, labels, seed)
    await _evaluate(guide, evaluations, settings, SOFT, soft, seed)
    on_policy = await _on_policy(guide, settings, soft, seed)
    await _evaluate(guide, evaluations, settings, ON_POLICY, on_policy, seed)
    await _lineage(guide, on_policy)
    return evaluations


async def _prepare(guide: Guide, seed: int) -> None:
    guide.heading(
        1,
        "A project",
        "A shop clerk answers questions with three tools. The teacher is a tiny model that does it "
        "well, the student one that has only learnt the format. Each question has its own price "
        "list, so nothing can be memorised; answers are checked exactly.",
    )
    await guide.call("create_project", template="demo", seed=seed)
    setup = await guide.call("check_setup", model="demo/student")
    for check in setup["checks"]:
        guide.say(f"    {check['status']:7} {check['name']}: {check['detail']}")
    report = await guide.call("validate_dataset", path=PROMPTS)
    guide.say(f"    {report['good']} prompts, {report['bad']} with problems")


async def _teacher_rollouts(guide: Guide, settings: DemoSettings, seed: int) -> None:
    guide.heading(
        2,
        "Teacher rollouts",
        f"The teacher answers {settings.num_rollouts} prompts, calling tools. Every call is kept "
        "in a journal, so a killed run goes on where it stood. Beside it, the teacher and the "
        "base student are evaluated on prompts that nothing trains on.",
    )
    run = await guide.run(
        "teacher rollouts",
        "generate_rollouts",
        input=PROMPTS,
        output=TEACHER_ROLLOUTS,
        provider="demo",
        model="teacher",
        n=settings.num_rollouts,
        temperature=1.2,
        seed=seed,
        **ACTING,
    )
    result = run["result"]
    guide.say(
        f"    {result['succeeded']} rollouts, {result['num_success']} with the right answer, "
        f"{result['failed']} failed, {result['calls']} model calls"
    )


async def _curate(guide: Guide) -> None:
    guide.heading(
        3,
        "Curation",
        "Only right answers reached without a tool error become training rows; each dropped row "
        "is written down with its reason.",
    )
    kept = await guide.call(
        "filter_dataset",
        input=TEACHER_ROLLOUTS,
        output=GOOD_ROLLOUTS,
        min_reward=1,
        max_tool_errors=0,
        require_final_answer=True,
        dedupe="exact",
    )
    dropped = ", ".join(f"{count} {reason}" for reason, count in kept["dropped"].items())
    guide.say(f"    read {kept['read']}, kept {kept['kept']}, dropped: {dropped or 'none'}")
    await guide.call("convert_rollouts", input=GOOD_ROLLOUTS, output="sft.jsonl")
    shown = await guide.call("inspect_examples", path="sft.jsonl", model="demo/student", n=1)
    guide.say("    the first row as the trainer sees it; only what stands in ⟦ ⟧ is trained:")
    for line in shown["examples"][0]["text"].splitlines():
        guide.say(f"      {line}")


async def _sft(guide: Guide, seed: int) -> tuple[str, str]:
    """Returns the run on the teacher's tokens and the one on its probabilities."""
    guide.heading(
        4,
        "Supervised fine-tuning, twice",
        "The student learns the teacher's conversations, the assistant's tokens only: once the "
        "tokens themselves, as from a teacher that gives text alone, and once the teacher's "
        "probabilities of all tokens there, which an open model also gives.",
    )
    overrides = [f"trainer.seed={seed}"]
    labels = await guide.start("start_training", config="sft.yml", overrides=overrides)
    soft = await guide.run("SFT", "start_training", config="soft_targets.yml", overrides=overrides)
    for run in (await guide.wait(labels), soft):
        guide.say(f"    {run['result']['steps']} steps, loss {run['metrics']['loss']:.3f}")
    return labels, soft["run_id"]


async def _on_policy(guide: Guide, settings: DemoSettings, start: str, seed: int) -> str:
    guide.heading(
        5,
        "On-policy distillation",
        "Now the student answers new prompts itself, and the teacher scores every token the "
        "student wrote: the reverse KL between the two is what is lowered. It learns from its own "
        "mistakes, not only from the teacher's good days.",
    )
    run = await guide.run(
        ON_POLICY,
        "start_training",
        config="distill.yml",
        overrides=[
            f"model.path={start}",
            f"trainer.seed={seed}",
            f"trainer.max_steps={settings.num_iterations}",
        ],
    )
    guide.say(
        f"    {run['result']['steps']} iterations, KL to the teacher on the student's own answers "
        f"{run['metrics']['teacher_kl']:.3f} nats per token"
    )
    return run["run_id"]


async def _evaluate(
    guide: Guide,
    evaluations: Evaluations,
    settings: DemoSettings,
    name: str,
    model: str,
    seed: int,
) -> None:
    """Starts an evaluation, which continues while the next stage runs."""
    measured: dict[str, Any] = {}
    if name != "teacher":
        measured = {"teacher": "demo/teacher", "kl_prompts": settings.num_kl_prompts}
    evaluations.run_ids[name] = await guide.start(
        "evaluate_model",
        model=model,
        name=name,
        data=HELDOUT,
        n=settings.num_heldout,
        seed=seed,
        **measured,
        **ACTING,
    )


async def _lineage(guide: Guide, run_id: str) -> None:
    """Prints the files and models that the last student was made from, and changes since then."""
    lineage = await guide.call("show_lineage", path=run_id)
    names = list(dict.fromkeys(_names(lineage["root"])))
    problems = "; ".join(lineage["problems"]) or "all as they were used"
    guide.say(f"    it comes from {', '.join(names)}: {problems}")


def _names(node: dict[str, Any]) -> Iterator[str]:
    for child in node.get("inputs", []):
        yield child["path"]
        yield from _names(child)
