"""How often a model answers the hidden texts of a job with exactly the right label.

    judge.py FOLDER/job [MODEL_FOLDER]

Prints a JSON line: for each kind of hidden text how many answers were right, of how many, and which
(one digit each, in the file's order). The model is prompted through its chat template, with the
system prompt in FOLDER/job/model.json ({"path": …, "system": …}), or with the job's own. A system
prompt of null leaves the system message out. Without MODEL_FOLDER, the path in model.json counts.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import NUM_HIDDEN

MAX_NEW_TOKENS, BATCH = 16, 16


class Student:
    """A model of a folder, which answers greedily."""

    def __init__(self, folder: str, system: str | None) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._system = system
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    @torch.inference_mode()
    def answers(self, texts: list[str]) -> list[str]:
        """Returns an answer to each text, without the white space around it."""
        prompts = [
            self._tokenizer.apply_chat_template(
                self._messages(text), tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
        inputs = self._tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False
        )
        output = self._model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        new = output[:, inputs["input_ids"].shape[1] :]
        return [
            answer.strip() for answer in self._tokenizer.batch_decode(new, skip_special_tokens=True)
        ]

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, {"role": "user", "content": text}]


def judged(student: Student, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Returns how many of the rows the student answers with their label, and which."""
    answers = list[str]()
    for start in range(0, len(rows), BATCH):
        answers += student.answers([row["text"] for row in rows[start : start + BATCH]])
    digits = [int(answer == row["label"]) for answer, row in zip(answers, rows, strict=True)]
    return {
        "accuracy": round(sum(digits) / len(digits), 4),
        "right": sum(digits),
        "of": len(digits),
        "solved": "".join(map(str, digits)),
    }


def main() -> None:
    """Judges a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=Path)
    parser.add_argument("model", nargs="?")
    options = parser.parse_args()
    settings = json.loads((options.job / "job.json").read_text(encoding="utf-8"))
    if (options.job / "model.json").exists():
        settings |= json.loads((options.job / "model.json").read_text(encoding="utf-8"))
    student = Student(options.model or settings["path"], settings["system"])
    hidden = options.job.resolve().parent / "hidden"
    figures = {}
    for kind in NUM_HIDDEN:
        lines = (hidden / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        figures[kind] = judged(student, [json.loads(line) for line in lines])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
