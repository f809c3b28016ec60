"""One side of one on-policy benchmark, in a process of its own; prints a JSON line.

    python benchmarks/on_policy/measure.py {ours,trl} WORK STUDENT TEACHER [--steps 3]

The rate counts sampled tokens per second of CPU time, after one step of warm-up; the peak of memory
is that of the whole process from the first step on. Both sides get the same prompts and the same
tools' replies as the same tokens, and sample as many tokens of each turn.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1]))

import transformers
from beside_trl.models import RANK, adapter, draw_adapter, plain
from beside_trl.steps import LEARNING_RATE, WARMUP, Meter, be_quiet, options, trl_run
from work import WORKS, Work, prompts, reply, tool_call

from stillroom.data.chat.render import ChatRenderer

MAX_CONTEXT = 4096


def reported(meter: Meter, work: Work, num_sampled: Sequence[int]) -> dict[str, Any]:
    """Returns what was measured. Raises AssertionError unless every step sampled as many tokens."""
    assert num_sampled == [work.num_sampled] * len(meter.seconds), num_sampled
    return meter.reported(num_sampled)


def given_rollouts(
    work: Work, renderer: ChatRenderer, step: int
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yields rollouts that nobody sampled: prompt, what follows, and 1 where it counts as sampled.

    The same on both sides, where only the update is measured.
    """
    rng = random.Random(step)
    for index, chat in enumerate(prompts(work, step)):
        completion: list[int] = []
        marks: list[int] = []
        for turn in range(work.turns):
            if turn:
                read = reply_ids(renderer, reply(step, index, turn))
                completion += read
                marks += [0] * len(read)
            completion += [rng.randrange(600, 30_000) for _ in range(work.turn_tokens)]
            marks += [1] * work.turn_tokens
        yield renderer.prompt_ids(chat, []), completion, marks


def reply_ids(renderer: ChatRenderer, said: str) -> list[int]:
    """Returns the tokens of a tool's reply."""
    message: Any = {"role": "tool", "tool_call_id": "call_0", "content": said}
    return renderer.reply_ids(tool_call(), [message], [])


def ours(work: Work, student_folder: Path, teacher_folder: Path, steps: int) -> dict[str, Any]:
    import anyio

    from stillroom.models.load import load_model
    from stillroom.models.resolve import locate_model
    from stillroom.settings import Workspace
    from stillroom.teachers.local_hf import LocalTeacher
    from stillroom.train.config.schema import DistillConfig
    from stillroom.train.on_policy.policy_update import update_student
    from stillroom.train.student.model import Optimizer, load_student

    workspace = Workspace(student_folder.parent)
    config = DistillConfig.model_validate(
        {
            "dataset_type": "distill",
            "data": {"batch_size": work.num_prompts, "group_size": work.group},
            "model": {
                "path": str(student_folder),
                "qlora_rank": RANK if work.is_lora else 0,
                "precision": "fp32",
            },
            "teacher": {"path": str(teacher_folder)},
            "algorithm": {"loss_fn": work.loss_fn},
            "trainer": {
                "num_epochs": 1,
                "learning_rate": LEARNING_RATE,
                "schedule": "constant",
                "warmup_steps": 0,
                "adam_beta2": 0.999,
            },
        }
    )
    student = load_student(workspace, config.model, seed=0)
    draw_adapter(student.module)
    teacher = LocalTeacher(load_model(workspace, locate_model(workspace, str(teacher_folder))))
    optimizer = Optimizer(student.trainable(), config.trainer, total_steps=steps)
    renderer = ChatRenderer(student.loaded.tokenizer)
    given = [list(given_rollouts(work, renderer, step)) for step in range(steps)]
    meter, counts = Meter(), []
    meter.begin()
    for step in range(steps):
        if work.phase == "update":
            sequences = [sequence_of(*rollout) for rollout in given[step]]
        else:
            sequences = anyio.run(our_rollouts, work, student, step)
        counts.append(sum(sequence.tokens.num_trained for sequence in sequences))
        if work.phase != "generate":
            stats = update_student(student, {0: teacher}, sequences, optimizer, config, step)
            meter.losses.append(stats.loss / stats.num_tokens)
        meter.end_step()
    return reported(meter, work, counts)


def sequence_of(prompt: list[int], completion: list[int], marks: list[int]) -> Any:
    from stillroom.models.batches import TokenSequence
    from stillroom.train.on_policy.training_sequences import TrainingSequence

    tokens = TokenSequence(
        [*prompt, *completion], [*[False] * len(prompt), *(mark == 1 for mark in marks)]
    )
    return TrainingSequence(tokens, [-10.0] * sum(marks))


async def our_rollouts(work: Work, student: Any, step: int) -> list[Any]:
    """Samples a step's rollouts as a training run does, tools' replies being at hand."""
    import anyio

    from stillroom.models.batches import sampled_sequence
    from stillroom.models.load import LoadedModel
    from stillroom.policy.hf import HFPolicy
    from stillroom.train.on_policy.training_sequences import TrainingSequence
    from stillroom.types import SamplingSettings

    student.module.eval()
    loaded = student.loaded
    endless = LoadedModel(loaded.location, loaded.model, loaded.tokenizer, frozenset())
    settings = SamplingSettings(temperature=1.0, max_tokens=work.turn_tokens, seed=step)
    policy = HFPolicy(endless, settings, max_rows=work.num_rollouts, max_context=MAX_CONTEXT)
    found: dict[int, Any] = {}

    async def roll_out(index: int, chat: Any) -> None:
        async with policy.converse(chat, [], seed_key=str(index)) as conversation:
            for turn in range(work.turns):
                if turn:
                    said = reply(step, index, turn)
                    message: Any = {"role": "tool", "tool_call_id": "call_0", "content": said}
                    conversation.add_responses(tool_call(), [message])
                await conversation.sample()
            trace = conversation.trace()
        marked = zip(trace.sampled, trace.logprobs, strict=True)
        logprobs = [logprob for is_sampled, logprob in marked if is_sampled]
        found[index] = TrainingSequence(sampled_sequence(trace), logprobs)

    async with policy, anyio.create_task_group() as tasks:
        for index, chat in enumerate(prompts(work, step)):
            tasks.start_soon(roll_out, index, chat)
    return [found[index] for index in range(work.num_rollouts)]


def trl(work: Work, student_folder: Path, teacher_folder: Path, steps: int) -> dict[str, Any]:
    import trl as package
    import trl.trainer.distillation_trainer as peer
    from datasets import Dataset

    # As it does on a GPU: of the hidden states only those of scored tokens reach the heads.
    peer._use_triton = lambda _device: True
    # Random weights never call a tool: every turn of theirs counts as a call.
    peer.parse_response = lambda *_args, **_more: tool_call_of_trl()
    tokenizer = transformers.AutoTokenizer.from_pretrained(student_folder)
    renderer = ChatRenderer(tokenizer)
    replies = iter(range(1 << 30))
    # The peer's loop over tools asks for a template that it knows; none is rendered with it.
    known = Path(package.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = known.read_text(encoding="utf-8")
    trainer_class = on_tokens(package.DistillationTrainer, work, renderer)

    def look_up(name: str) -> str:
        """Look something up.

        Args:
            name: What to look up.
        """
        number = next(replies)
        return reply(number, 0, 0)

    trainer = trainer_class(
        model=plain(student_folder),
        teacher_model=plain(teacher_folder),
        args=package.DistillationConfig(
            **options(work.num_rollouts, steps),
            beta=1.0,
            max_completion_length=MAX_CONTEXT,
            generation_kwargs={"max_new_tokens": work.turn_tokens},
            max_tool_calling_iterations=work.turns - 1 if work.turns > 1 else None,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": chat} for step in range(steps) for chat in prompts(work, step)]
        ),
        processing_class=tokenizer,
        peft_config=adapter(is_lora=work.is_lora),
        tools=[look_up] if work.turns > 1 else None,
    )
    # No token ends a turn, so that all are as long as ours.
    trainer.generation_config.eos_token_id = None
    trainer.generation_kwargs["eos_token_id"] = None
    trainer.eos_token_ids = [-1]
    if work.phase == "generate":
        return trl_generate(trainer, work, steps)
    return reported(trl_run(trainer), work, trainer.counts)


def on_tokens(base: Any, work: Work, renderer: ChatRenderer) -> Any:
    """Returns the peer's trainer with tokens given, so that both run on the very same."""

    class OnTokens(base):
        counts: list[int]

        def _tokenize_prompts(self, chats: Any) -> Any:
            return [renderer.prompt_ids(chat, []) for chat in chats], None, {}

        def _get_tool_suffix_ids(self, tool_messages: Any) -> list[int]:
            return reply_ids(renderer, tool_messages[0]["content"])

        def _generate(self, chats: Any) -> Any:
            if work.phase == "update":
                given, completions, marks = zip(
                    *given_rollouts(work, renderer, len(self.counts)), strict=True
                )
                found = list(given), list(completions), list(marks), None, []
            else:
                found = super()._generate(chats)
            _, completions, marks, *_ = found
            sampled = marks if marks is not None else completions
            self.counts.append(sum(map(len, sampled)) if marks is None else sum(map(sum, sampled)))
            return found

    OnTokens.counts = []
    return OnTokens


def tool_call_of_trl() -> dict[str, Any]:
    function = {"name": "look_up", "arguments": {"name": "x"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


def trl_generate(trainer: Any, work: Work, steps: int) -> dict[str, Any]:
    meter = Meter()
    meter.begin()
    for step in range(steps):
        trainer._generate(prompts(work, step))
        meter.end_step()
    return reported(meter, work, trainer.counts)


SIDES: dict[str, Callable[[Work, Path, Path, int], dict[str, Any]]] = {"ours": ours, "trl": trl}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=SIDES)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("student", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="after the warm-up")
    args = parser.parse_args()
    be_quiet()
    work = WORKS[args.work]
    found = SIDES[args.who](work, args.student, args.teacher, args.steps + WARMUP)
    print(json.dumps({"bench": args.work, "who": args.who, **found}), flush=True)


if __name__ == "__main__":
    main()
