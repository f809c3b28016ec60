"""Writes rollouts of long tool conversations, the same ones for the same seed: make_rollouts.py OUT MB [--seed 0].

Each row has our layout (`messages`, `stop_reason`, …) and the fields of NeMo Gym (`responses_create_params`,
`response`, …); four rollouts share a task, an eighth failed, some repeat the conversation before.
"""

import argparse
import json
import random

TEXT = """
trial drug regimen arm dose patient response overall survival progression phase study approval label patent
sponsor company share price enzalutamide exemestane everolimus placebo cohort median hazard ratio confidence
interval adverse event grade oral daily weekly cycle the a of in and to for with was were is on at by from
"""
WORDS = TEXT.split()
CATEGORIES = ["Ingredient", "Company", "Stock", "Start Date", "Patent", "Approval"]
SYSTEM = "You are a research assistant with browser tools.\n\nReturn answers in the exact format requested."
TOOLS = ["browser_navigate", "browser_click", "browser_snapshot", "browser_type", "browse"]


def dumps(value) -> str:
    return json.dumps(value, separators=(",", ":"))


class Maker:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sentences = [" ".join(self.chance.choices(WORDS, k=40)) + "." for _ in range(4096)]

    def text(self, size: int) -> str:
        return "\n".join(self.chance.choices(self.sentences, k=max(1, size // 260)))

    def page(self) -> str:
        some = self.chance.choices(
            self.sentences, k=max(1, int(self.chance.lognormvariate(7.6, 0.8)) // 290)
        )
        lines = [f'- generic [ref=e{n}]: "{sentence}"' for n, sentence in enumerate(some)]
        return "- Page URL: https://example.org/study\n```yaml\n" + "\n".join(lines) + "\n```"

    def call(self, turn: int) -> dict:
        arguments = dumps(
            {"url": f"https://example.org/{self.chance.randrange(10**8)}", "element": "link"}
        )
        function = {"name": self.chance.choice(TOOLS), "arguments": arguments}
        return {
            "id": f"call_{self.chance.getrandbits(32):08x}{turn}",
            "type": "function",
            "function": function,
        }

    def conversation(self, task: int, category: str) -> tuple[list, list, int, bool]:
        question = f"For trial NCT{task * 7919 % 10**8:08d}. {self.sentences[task % 4096]} Return only the {category}."
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        items: list[dict] = []
        turns = min(24, 1 + int(self.chance.lognormvariate(1.1, 0.6)))
        for turn in range(turns):
            thought = self.text(int(self.chance.lognormvariate(5.8, 0.7)))
            call = self.call(turn)
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": thought,
                    "tool_calls": [call],
                }
            )
            reply = (
                "TimeoutError: no answer in 60 s" if self.chance.random() < 0.03 else self.page()
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": reply})
            items += [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]},
                {"type": "function_call", "call_id": call["id"], **call["function"]},
                {"type": "function_call_output", "call_id": call["id"], "output": reply},
            ]
        is_right = self.chance.random() > 0.12
        answer = (
            f"{self.text(500)}\n\n{category.upper()}: {self.chance.choice(WORDS).upper()}"
            if is_right
            else ""
        )
        messages.append(
            {"role": "assistant", "content": answer, "reasoning_content": self.text(300)}
        )
        said = [{"type": "output_text", "text": answer, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": said})
        return messages, items, turns + 1, is_right

    def row(self, number: int, task: int, made: tuple[list, list, int, bool]) -> dict:
        messages, items, turns, is_right = made
        reward = round(self.chance.betavariate(2, 1.2), 3) if is_right else 0.0
        category = CATEGORIES[task % len(CATEGORIES)]
        return {
            "id": f"sample_{number}", "success": is_right, "stop_reason": "answered" if is_right else "error",
            "rewards": {"accuracy": reward}, "turns": turns, "truncated": False,
            "error": None if is_right else {"class": "internal", "message": "the rollout failed"},
            "metadata": {"expected_answer": self.chance.choice(WORDS), "task_type": category}, "task_id": f"task_{task}",
            "_ng_task_index": task, "_ng_rollout_index": number % 4, "reward": reward,
            "responses_create_params": {"input": messages[:2], "tools": []},
            "response": {"id": f"resp_{number}", "object": "response", "output": items},
            "messages": messages,
        }  # fmt: skip


def write(out: str, megabytes: float, seed: int = 0) -> int:
    maker, size, number, made = Maker(seed), 0, 0, None
    with open(out, "wb") as stream:  # noqa: PTH123
        while size < megabytes * 1e6:
            task = number // 4
            if made is None or maker.chance.random() > 0.03:
                made = maker.conversation(task, CATEGORIES[task % len(CATEGORIES)])
            size += stream.write(dumps(maker.row(number, task, made)).encode() + b"\n")
            number += 1
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("mb", type=float)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps({"rows": write(options.out, options.mb, options.seed)}))
