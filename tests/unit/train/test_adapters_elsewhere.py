"""Checkpoints in plain peft and transformers: an adapter on its base, and merged, say the same."""

import random

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes.conversations import answer, user
from fakes.exports import greedy
from fakes.training import make_project
from stillroom.data.chat.render import ChatRenderer
from stillroom.models.load import load_model
from stillroom.models.resolve import locate_model

ROWS = [{"messages": [user(f"Item {i}?"), answer(f"It costs {i}.")]} for i in range(12)]
WORDS = ["lamp", "chair", "red", "stock", "cost", "price", "how", "many", "which", "12"]


def prompts(tokenizer, count):
    draw = random.Random(0)
    questions = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 9))) + "?" for _ in range(count)]
    renderer = ChatRenderer(tokenizer)
    return [renderer.prompt_ids([user(question)], []) for question in questions]


@pytest.mark.parametrize("model", [{}, {"quantization": "nf4"}], ids=["lora", "qlora"])
def test_an_adapter_on_its_base_and_merged_answer_alike(tmp_path, tiny_models, model):
    base = tiny_models.folder("llama", "chatml")
    trainer = {"num_epochs": 4, "learning_rate": 1e-2}
    project = make_project(tmp_path, "sft", base, model={"qlora_rank": 4, **model}, trainer=trainer)
    project.write(ROWS)
    project.train()

    tokenizer = AutoTokenizer.from_pretrained(project.checkpoint())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    starts = prompts(tokenizer, 40)
    before = greedy(plain, starts)
    adapted = PeftModel.from_pretrained(plain, project.checkpoint()).eval()
    merged = load_model(project.workspace, locate_model(project.workspace, "run-1")).model

    answers = greedy(adapted, starts)

    assert greedy(merged, starts) == answers
    assert sum(a != b for a, b in zip(answers, before, strict=True)) > 20
