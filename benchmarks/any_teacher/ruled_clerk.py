"""A clerk that obeys a rule in its system message: the model of `prompt_distillation.py`.

The demo's own models were trained with one system message, so it says little to them. This one is
the demo's teacher, trained further on conversations of which half have a rule: `A fee of K coins is
added to every answer.`, with K from 2 to 99. It reads K from the message; without a rule it adds
nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_models.conversations import gold_messages, make_training_task
from demo_models.curriculum import TrainingExample, _encode_messages
from demo_models.pretrain import fit, shuffled_batches
from stillroom.demo.shop import TASK_TYPES, evaluate
from stillroom.demo.world import SYSTEM, PlannedCall, ShopTask
from stillroom.types import Message

NUM_EXAMPLES, NUM_STEPS, BATCH_SIZE, PEAK_LEARNING_RATE = 24_000, 2000, 16, 2e-3


def rule(fee: int) -> str:
    """Returns the system message with the rule."""
    return f"{SYSTEM} A fee of {fee} coins is added to every answer."


def with_fee(task: ShopTask, fee: int) -> ShopTask:
    """Returns the task as it is solved under the rule: the calculator adds the fee last."""
    *before, last = task.gold_plan
    if last.tool == "calculator":
        plan = (*before, PlannedCall("calculator", f"{last.argument}+{fee}"))
    else:
        plan = (
            *task.gold_plan,
            PlannedCall("calculator", f"{task.expected_answer}+{fee}"),
        )
    return replace(task, gold_plan=plan, expected_answer=str(evaluate(plan[-1].argument)))


def make_model(start: Path, folder: Path, *, seed: int) -> None:
    """Trains the model in `start` on conversations with and without a rule; writes it to `folder`."""
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    model = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.float32)
    batches = shuffled_batches(_examples(tokenizer, seed=seed), batch_size=BATCH_SIZE, seed=seed)
    print(fit(model, batches, num_steps=NUM_STEPS, peak_learning_rate=PEAK_LEARNING_RATE))
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _examples(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Sequence[TrainingExample]:
    rng = Random(seed)
    return [_encode_messages(tokenizer, _conversation(rng)) for _ in range(NUM_EXAMPLES)]


def _conversation(rng: Random) -> list[Message]:
    """Returns a conversation: half have a rule, a quarter the demo's message, a quarter none."""
    task = make_training_task(rng, rng.choice(TASK_TYPES))
    kind = rng.choice(("rule", "rule", "plain", "none"))
    if kind == "rule":
        fee = rng.randint(2, 99)
        _, *rest = gold_messages(with_fee(task, fee))
        return [{"role": "system", "content": rule(fee)}, *rest]
    messages = gold_messages(task)
    return messages if kind == "plain" else messages[1:]
