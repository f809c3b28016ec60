"""The stages of the demo, in the order of a real distillation."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio

from stillroom_mcp.demo.guide import DemoStoppedError, Guide

PROMPTS, HELDOUT = "prompts.jsonl", "heldout.jsonl"
TEACHER_ROLLOUTS = "rollouts/teacher.jsonl"
GOOD_ROLLOUTS = "rollouts/teacher-good.jsonl"
SFT_TOKENS, SFT_SOFT, ON_POLICY = "SFT, tokens", "SFT, soft", "on-policy"
"""The names of the demo's students in the table of results."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The sizes of the demo's stages; all other settings are in the project's files."""

    num_rollouts: int
    """The number of prompts that the teacher answers."""
    num_heldout: int
    """The number of held-out prompts in each evaluation."""
    num_iterations: int
    """The number of iterations of on-policy distillation."""
    num_kl_prompts: int
    """The number of held-out prompts on which the KL to the teacher is measured."""


FULL = DemoSettings(num_rollouts=300, num_heldout=300, num_iterations=44, num_kl_prompts=90)
SMOKE = DemoSettings(num_rollouts=160, num_heldout=120, num_iterations=8, num_kl_prompts=30)

ROLLOUT_ARGUMENTS = {
    "tools": "tools.py",
    "rewards": "rewards.py",
    "max_turns": 5,
    "max_tokens": 48,
    "concurrency": 64,
}
"""The arguments of every call that generates rollouts, evaluations included."""


@dataclass(slots=True)
class Stages:
    """The state that the demo's stages share."""

    guide: Guide
    settings: DemoSettings
    seed: int
    where: str | None = None
    """The machine on which models are trained and evaluated; None for this one."""
    rows_ready: anyio.Event = field(default_factory=anyio.Event)
    """Set once the rows for supervised fine-tuning are written."""
    soft_ready: anyio.Event = field(default_factory=anyio.Event)
    """Set once the student is trained on soft targets."""
    trained: dict[str, str] = field(default_factory=dict[str, str])
    """The run ids of the trained students, by their names in the table of results."""
    evaluated: dict[str, str] = field(default_factory=dict[str, str])
    """The evaluations' run ids, by the model's name in the table of results."""

    @property
    def where_argument(self) -> dict[str, str]:
        """The `where` argument of calls that may run on another machine; empty for this machine."""
        return {"where": self.where} if self.where is not None else {}


async def run_chain(
    guide: Guide, settings: DemoSettings, seed: int, where: str | None = None
) -> Stages:
    """Runs all stages and returns their results; the last evaluation may still be running.

    With `where`, models are trained and evaluated on that machine of machines.yml.

    Raises DemoStoppedError if a call or run fails.
    """
    stages = Stages(guide, settings, seed, where)
    try:
        async with anyio.create_task_group() as group:
            await _prepare(stages)
            group.start_soon(_run_in_background, stages)
            await _generate_rollouts(stages)
            await _curate(stages)
            await _train_sft(stages)
            await _train_on_policy(stages)
            await _evaluate(stages, ON_POLICY)
            await _show_lineage(stages)
    except ExceptionGroup as failures:
        stopped, others = failures.split(DemoStoppedError)
        if stopped is None or others is not None:
            raise
        raise stopped.exceptions[0] from None
    return stages


async def _run_in_background(stages: Stages) -> None:
    """Runs what no stage waits for, one run at a time, so that the stages keep a CPU core."""
    guide = stages.guide
    for name, model in (("base student", "demo/student"), ("teacher", "demo/teacher")):
        await guide.wait(await _evaluate(stages, name, model), is_shown=False)
    await stages.rows_ready.wait()
    run = await guide.wait(await _start_sft(stages, SFT_TOKENS, "sft.yml"), is_shown=False)
    _print_training(guide, SFT_TOKENS, run)
    await guide.wait(await _evaluate(stages, SFT_TOKENS), is_shown=False)
    await stages.soft_ready.wait()
    await guide.wait(await _evaluate(stages, SFT_SOFT), is_shown=False)


async def _prepare(stages: Stages) -> None:
    guide = stages.guide
    guide.heading(
        1,
        "A project",
        "A shop clerk answers questions with three tools. The teacher is a tiny model that does "
        "this well; the student has only learnt the format. Each question has its own price list, "
        "so nothing can be memorised; answers are checked exactly.",
    )
    await guide.call("create_project", template="demo", seed=stages.seed)
    setup = await guide.call("check_setup", model="demo/student")
    for check in setup["checks"]:
        guide.say(f"    {check['status']:7} {check['name']}: {check['detail']}")
    report = await guide.call("validate_dataset", path=PROMPTS)
    guide.say(f"    {report['good']} prompts, {report['bad']} with problems")


async def _generate_rollouts(stages: Stages) -> None:
    guide, settings = stages.guide, stages.settings
    guide.heading(
        2,
        "Teacher rollouts",
        f"The teacher answers {settings.num_rollouts} prompts, calling tools. Every call is kept "
        "in a journal, so a killed run resumes where it stopped. In the background, all models "
        "are evaluated on prompts that no stage trains on.",
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
        seed=stages.seed,
        **ROLLOUT_ARGUMENTS,
    )
    result = run["result"]
    guide.say(
        f"    {result['succeeded']} rollouts, {result['num_success']} with the right answer, "
        f"{result['failed']} failed, {result['calls']} model calls"
    )


async def _curate(stages: Stages) -> None:
    guide = stages.guide
    guide.heading(
        3,
        "Curation",
        "Only right answers without a tool error become training rows; each dropped row is "
        "recorded with its reason.",
    )
    result = await guide.call(
        "filter_dataset",
        input=TEACHER_ROLLOUTS,
        output=GOOD_ROLLOUTS,
        min_reward=1,
        max_tool_errors=0,
        require_final_answer=True,
        dedupe="exact",
    )
    dropped = ", ".join(f"{count} {reason}" for reason, count in result["dropped"].items())
    guide.say(f"    read {result['read']}, kept {result['kept']}, dropped: {dropped or 'none'}")
    await guide.call("convert_rollouts", input=GOOD_ROLLOUTS, output="sft.jsonl")
    stages.rows_ready.set()
    page = await guide.call("inspect_examples", path="sft.jsonl", model="demo/student", n=1)
    guide.say("    the first row as training sees it; only text in ⟦ ⟧ is trained:")
    for line in page["examples"][0]["text"].splitlines():
        guide.say(f"      {line}")


async def _train_sft(stages: Stages) -> None:
    guide = stages.guide
    guide.heading(
        4,
        "Supervised fine-tuning, twice",
        "The student learns the assistant's tokens in the teacher's conversations: once from the "
        "tokens themselves, which any teacher gives, and once from the teacher's probabilities "
        "at these tokens, which an open model also gives.",
    )
    with guide.timed("SFT"):
        run = await guide.wait(await _start_sft(stages, SFT_SOFT, "soft_targets.yml"))
    _print_training(guide, SFT_SOFT, run)
    stages.soft_ready.set()


async def _start_sft(stages: Stages, name: str, config: str) -> str:
    """Starts the training of a student and returns its run id."""
    overrides = [f"trainer.seed={stages.seed}"]
    run_id = await stages.guide.start(
        "start_training", config=config, overrides=overrides, **stages.where_argument
    )
    stages.trained[name] = run_id
    return run_id


def _print_training(guide: Guide, name: str, run: dict[str, Any]) -> None:
    """Prints the steps and the last loss of a finished training."""
    guide.say(f"    {name}: {run['result']['steps']} steps, loss {run['metrics']['loss']:.3f}")


async def _train_on_policy(stages: Stages) -> None:
    guide, settings = stages.guide, stages.settings
    guide.heading(
        5,
        "On-policy distillation",
        "Now the student answers new prompts itself, and the teacher scores every token that the "
        "student generated; training lowers the reverse KL between the two. The student learns "
        "from its own mistakes, not only from the teacher's answers.",
    )
    run = await guide.run(
        ON_POLICY,
        "start_training",
        config="distill.yml",
        overrides=[
            f"model.path={stages.trained[SFT_SOFT]}",
            f"trainer.seed={stages.seed}",
            f"trainer.max_steps={settings.num_iterations}",
        ],
        **stages.where_argument,
    )
    guide.say(
        f"    {run['result']['steps']} iterations, KL to the teacher on the student's own answers "
        f"{run['metrics']['teacher_kl']:.3f} nats per token"
    )
    stages.trained[ON_POLICY] = run["run_id"]


async def _evaluate(stages: Stages, name: str, model: str | None = None) -> str:
    """Starts the evaluation of a model (by default a trained student) and returns its run id."""
    settings = stages.settings
    kl_arguments: dict[str, Any] = {}
    if name != "teacher":
        kl_arguments = {"teacher": "demo/teacher", "kl_prompts": settings.num_kl_prompts}
    run_id = await stages.guide.start(
        "evaluate_model",
        model=model or stages.trained[name],
        name=name,
        data=HELDOUT,
        n=settings.num_heldout,
        seed=stages.seed,
        **kl_arguments,
        **ROLLOUT_ARGUMENTS,
        **stages.where_argument,
    )
    stages.evaluated[name] = run_id
    return run_id


async def _show_lineage(stages: Stages) -> None:
    """Prints the files and models behind the last student, and whether they have changed."""
    lineage = await stages.guide.call("show_lineage", path=stages.trained[ON_POLICY])
    names = list(dict.fromkeys(_input_paths(lineage["root"])))
    problems = "; ".join(lineage["problems"]) or "all unchanged since"
    stages.guide.say(f"    made from {', '.join(names)}: {problems}")


def _input_paths(node: dict[str, Any]) -> Iterator[str]:
    for child in node.get("inputs", []):
        yield child["path"]
        yield from _input_paths(child)
