"""Turns a job of worlds.py into one whose inputs a model has answered already, in messy logs.

    logs.py FOLDER/job

Writes job/logs in place of job/inputs.csv: the calls of two APIs, openai.jsonl and anthropic.jsonl,
in no order, with the teacher's wrong and chatty answers; a twentieth of the calls was made twice, a
thirtieth failed; and thumbs.csv, in which users have judged a third of them, nearly always rightly.
"""

import argparse
import csv
import json
from pathlib import Path
from random import Random
from typing import Any

from teacher import Teacher, chance, load_teacher

REPEATED, FAILED, JUDGED, MISJUDGED = 0.05, 0.03, 0.33, 0.03


def openai_call(system: str, text: str, answer: str | None) -> dict[str, Any]:
    """Returns a logged call of OpenAI's API; an answer of None is an error."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}}
    response: dict[str, Any] = {
        "object": "chat.completion",
        "model": "big",
        "choices": [{**choice, "finish_reason": "stop"}],
    }
    if answer is None:
        response = {"error": {"message": "overloaded", "type": "server_error"}}
    return {"request": {"model": "big", "messages": messages}, "response": response}


def anthropic_call(system: str, text: str, answer: str | None) -> dict[str, Any]:
    """Returns a logged call of Anthropic's API; an answer of None is an error."""
    request = {"model": "large", "max_tokens": 99, "system": system}
    response: dict[str, Any] = {
        "type": "message",
        "role": "assistant",
        "model": "large",
        "content": [{"type": "text", "text": answer}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": len(text) // 4, "output_tokens": len(answer or "") // 4},
    }
    if answer is None:
        error = {"type": "overloaded_error", "message": "overloaded"}
        response = {"type": "error", "error": error}
    user = {"role": "user", "content": text}
    return {"request": {**request, "messages": [user]}, "response": response}


APIS = {"openai": openai_call, "anthropic": anthropic_call}


def write_logs(job: Path, teacher: Teacher) -> None:
    """Writes the logs of a job's inputs and removes the inputs."""
    system = json.loads((job / "job.json").read_text(encoding="utf-8"))["system"]
    calls: dict[str, list[dict[str, Any]]] = {name: [] for name in APIS}
    thumbs: list[tuple[str, str]] = []
    with (job / "inputs.csv").open(encoding="utf-8", newline="") as file:
        inputs = list(csv.DictReader(file))
    for number, row in enumerate(inputs):
        name = list(APIS)[number % len(APIS)]
        for attempt in range(2 if chance("repeated", row["text"]) < REPEATED else 1):
            call_id, (_, label) = f"{row['id']}-{attempt}", teacher.find(row["text"])
            said: str | None = teacher.answer(row["text"], label, f"logged {attempt}")
            if chance("failed", call_id) < FAILED:
                said = None
            call = APIS[name](system, row["text"], said)
            calls[name].append({"id": call_id, "created": row["created"], **call})
            if said is not None and chance("judged", call_id) < JUDGED:
                is_right = str(label) in said
                is_up = is_right != (chance("misjudged", call_id) < MISJUDGED)
                thumbs.append((call_id, "up" if is_up else "down"))
    (job / "logs").mkdir()
    for name, rows in calls.items():
        Random(name).shuffle(rows)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (job / "logs" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    with (job / "logs" / "thumbs.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("call_id", "thumb"), *thumbs])
    (job / "inputs.csv").unlink()


def main() -> None:
    """Writes the logs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=Path)
    job = parser.parse_args().job.resolve()
    write_logs(job, load_teacher(job))


if __name__ == "__main__":
    main()
