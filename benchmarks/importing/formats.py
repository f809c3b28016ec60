"""Imports the same conversations in the layouts of several sources, and shows what each costs.

`python benchmarks/importing/formats.py [--mb 50] [--formats litellm …] [--against CHECKOUT]` writes a
log of each layout (agents' calls as `speed.py` makes them, the history repeated in each call) and
imports it in a process of its own, on one processor. With `--against` each is imported by another
checkout of the project too (with its own `.venv`), in turn, and the outputs are compared byte for
byte. Prints one JSON line: for each layout MB of the source per second of processor time, the best
of `--times`. The seconds that an import of one call takes (`start_cpu_s`) are not counted.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from speed import IMPORT, SHAPES, Talk

ROOT = Path(__file__).resolve().parents[2]
CHARGE = (
    "import atexit, os, resource;"
    "atexit.register(lambda: open('cpu', 'w').write(str(sum(sum(resource.getrusage(who)[:2])"
    " for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))));"
)


def chat(row, _):
    """Returns the line of a call as most loggers of OpenAI's chat completions write it."""
    return [row]


def recorded(row, number):
    """Returns the line of a call in a journal of `stillroom record`; each second one is streamed."""
    reply = row["response"]
    text, kind = json.dumps(reply), "application/json"
    if number % 2:
        text, kind = "".join(streamed(reply)), "text/event-stream"
    request = {"content": {"text": json.dumps(row["request"])}, "headers": {"user-agent": "x"}}
    return [{
        "stillroom_record": 1, "id": f"{number:032x}", "kind": "chat", "path": "/v1/chat/completions",
        "upstream": "https://api.openai.com", "started_at": "2026-03-01T10:00:00.000+00:00",
        "duration_s": 1.2, "first_block_s": 0.4, "end": "whole", "provider": "openai", "request": request,
        "reply": {"status": 200, "reason": "OK", "headers": [["content-type", kind]],
                  "content": {"text": text}},
    }]  # fmt: skip


def streamed(reply):
    """Yields the events in which a reply is streamed, a word each."""
    head = {"id": reply["id"], "object": "chat.completion.chunk", "model": reply["model"]}
    [choice] = reply["choices"]
    words = choice["message"]["content"].split(" ")
    deltas = [{"role": "assistant", "content": ""}, *({"content": f"{word} "} for word in words)]
    for index, call in enumerate(choice["message"].get("tool_calls", ())):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    for delta in deltas:
        choices = [{"index": 0, "delta": delta, "finish_reason": None}]
        yield f"data: {json.dumps({**head, 'choices': choices})}\n\n"
    end = [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]
    yield f"data: {json.dumps({**head, 'choices': end})}\n\n"
    yield f"data: {json.dumps({**head, 'choices': [], 'usage': reply['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def litellm(row, number):
    """Returns the payload that LiteLLM hands its loggers."""
    request, reply = row["request"], row["response"]
    parameters = {"temperature": 0.2, "tools": request["tools"], "max_tokens": 512}
    return [{
        "id": reply["id"], "trace_id": f"t{number}", "session_id": "", "call_type": "acompletion",
        "status": "success", "custom_llm_provider": "openai", "startTime": 1760000000.5,
        "endTime": 1760000001.5, "completionStartTime": 1760000001.1, "model": reply["model"],
        "metadata": {"user_api_key_hash": None, "usage_object": reply["usage"]}, "response_cost": 0.001,
        "total_tokens": 960, "prompt_tokens": 900, "completion_tokens": 60, "request_tags": [],
        "messages": request["messages"], "response": reply, "model_parameters": parameters,
        "error_information": {"error_code": "", "error_message": ""}, "error_str": None,
    }]  # fmt: skip


def anthropic(row, number):
    """Returns a row with a request to Anthropic's Messages and the message that came back."""
    system, *messages = row["request"]["messages"]
    reply = row["response"]["choices"][0]["message"]
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in row["request"]["tools"])
    ]
    request = {"model": "claude-x", "max_tokens": 512, "system": system["content"], "tools": tools,
               "messages": [turn(message) for message in messages]}  # fmt: skip
    response = {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": "claude-x",
        "content": turn(reply)["content"], "stop_sequence": None,
        "stop_reason": "tool_use" if "tool_calls" in reply else "end_turn",
        "usage": {"input_tokens": 900, "output_tokens": 60},
    }  # fmt: skip
    return [{"request": request, "response": response, "timestamp": 1760000000 + number}]


def turn(message):
    """Returns a message in Anthropic's blocks."""
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
        return {"role": "user", "content": [{**block, "content": message["content"]}]}
    if message["role"] == "user":
        return {"role": "user", "content": message["content"]}
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
         "input": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]  # fmt: skip
    text = {"type": "text", "text": message["content"]}
    return {"role": "assistant", "content": [text, *calls]}


def otel(row, number):
    """Returns a span with its messages as JSON texts, one to a line."""
    request, reply = row["request"], row["response"]
    [choice] = reply["choices"]
    output = {**parts(choice["message"]), "finish_reason": choice["finish_reason"]}
    tools = [{"type": "function", **tool["function"]} for tool in request["tools"]]
    attributes = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
        "gen_ai.request.model": request["model"], "gen_ai.response.model": reply["model"],
        "gen_ai.response.id": reply["id"],
        "gen_ai.input.messages": json.dumps([parts(m) for m in request["messages"]]),
        "gen_ai.output.messages": json.dumps([output]),
        "gen_ai.tool.definitions": json.dumps(tools),
    }  # fmt: skip
    listed = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    listed.append({"key": "gen_ai.usage.input_tokens", "value": {"intValue": "900"}})
    listed.append({"key": "gen_ai.usage.output_tokens", "value": {"intValue": "60"}})
    span = {
        "traceId": f"{number:032x}", "spanId": f"{number:016x}", "name": "chat", "kind": 3,
        "startTimeUnixNano": "1760000000000000000", "endTimeUnixNano": "1760000001000000000",
        "attributes": listed, "status": {},
    }  # fmt: skip
    return [{"resourceSpans": [{"resource": {"attributes": []},
                                "scopeSpans": [{"scope": {"name": "x"}, "spans": [span]}]}]}]  # fmt: skip


def parts(message):
    """Returns a message in OpenTelemetry's parts."""
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message["tool_call_id"]}
        return {"role": "tool", "parts": [{**part, "response": message["content"]}]}
    calls = [
        {"type": "tool_call", "id": call["id"], "name": call["function"]["name"],
         "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]  # fmt: skip
    return {
        "role": message["role"],
        "parts": [{"type": "text", "content": message["content"]}, *calls],
    }


LAYOUTS = {"openai_chat": chat, "stillroom_record": recorded, "litellm": litellm,
           "anthropic_messages": anthropic, "otel_genai": otel}  # fmt: skip


def claude_code(folder, num_bytes):
    """Writes sessions of Claude Code of 200 calls, a file each, as they repeat nothing."""
    draw, written, number = random.Random(5), 0, 0
    while written < num_bytes:
        with (folder / f"{number}.jsonl").open("w", encoding="utf-8") as stream:
            parent = None
            for count, message in enumerate(session(draw, number)):
                line = session_line(number, count, parent, message)
                parent = line["uuid"]
                written += stream.write(json.dumps(line, separators=(",", ":")) + "\n")
        number += 1


def session(draw, number):
    """Yields the messages of a session, in which the user asks ten times."""
    for asked in range(10):
        talk = Talk(draw, WORDS, number, SHAPES["agent"])
        yield turn(talk.messages[1])
        while talk.calls < SHAPES["agent"].calls:
            num_messages = len(talk.messages)
            row = talk.next_call()
            about = {"id": f"msg_{number}_{asked}_{talk.calls}", "model": "claude-x",
                     "stop_reason": "end_turn", "usage": {"input_tokens": 9, "output_tokens": 2}}  # fmt: skip
            yield turn(row["response"]["choices"][0]["message"]) | about
            yield from map(turn, talk.messages[num_messages + 1 :])


def session_line(number, name, parent, message):
    """Returns a line of a session."""
    return {
        "parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/project",
        "sessionId": f"s{number}", "version": "2.1.0", "type": message["role"], "message": message,
        "uuid": f"{number}-{name}", "timestamp": "2026-03-01T10:00:00.000Z",
    }  # fmt: skip


def words():
    """Returns the words that all texts are made of."""
    draw = random.Random(11)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
            for _ in range(5000)]  # fmt: skip


WORDS = words()


def write(folder, layout, num_bytes):
    """Writes a log of one layout, with 20 conversations going on at the same time."""
    draw, written, number, talks = random.Random(7), 0, 0, []
    with (folder / "calls.jsonl").open("w", encoding="utf-8") as stream:
        while written < num_bytes:
            talks = [talk for talk in talks if talk.calls < SHAPES["agent"].calls]
            while len(talks) < 20:
                talks.append(Talk(draw, WORDS, number + len(talks), SHAPES["agent"]))
            for row in LAYOUTS[layout](draw.choice(talks).next_call(), number):
                written += stream.write(json.dumps(row, separators=(",", ":")) + "\n")
            number += 1


def imported(checkout, folder):
    """Imports a folder's log with a checkout; returns seconds of its processes and the output."""
    command = [
        "taskset",
        "-c",
        "0",
        str(checkout / ".venv" / "bin" / "python"),
        "-c",
        CHARGE + IMPORT,
    ]
    subprocess.run([*command, str(folder)], check=True, cwd=folder, stdout=subprocess.DEVNULL,
                   env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    output = hashlib.sha256((folder / "rollouts.jsonl").read_bytes()).hexdigest()
    return float((folder / "cpu").read_text()), output


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=50)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--formats", nargs="*", choices=[*LAYOUTS, "claude_code"],
                        default=[*LAYOUTS, "claude_code"])  # fmt: skip
    parser.add_argument("--against", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    top = options.folder or Path(tempfile.mkdtemp(prefix="import-formats-"))
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    few = top / "few" / "logs"
    few.mkdir(parents=True, exist_ok=True)
    write(few, "openai_chat", 1)
    start = [min(imported(each, top / "few")[0] for _ in range(3)) for each in checkouts]
    made = {}
    for layout in options.formats:
        logs = top / layout / "logs"
        if not logs.exists():
            logs.mkdir(parents=True)
            if layout == "claude_code":
                claude_code(logs, options.mb * 1e6)
            else:
                write(logs, layout, options.mb * 1e6)
        num_mb = sum(path.stat().st_size for path in logs.iterdir()) / 1e6
        runs = [[imported(each, top / layout) for each in checkouts] for _ in range(options.times)]
        best = [
            max(0.01, min(run[index][0] for run in runs) - start[index])
            for index in range(len(checkouts))
        ]
        made[layout] = {"mb_per_cpu_s": round(num_mb / best[0], 1)}
        if options.against:
            made[layout] |= {"against": round(num_mb / best[1], 1),
                             "ratio": round(best[1] / best[0], 2),
                             "same_output": len({output for run in runs for _, output in run}) == 1}  # fmt: skip
    print(json.dumps({"mb": options.mb, "python": sys.version.split()[0],
                      "start_cpu_s": round(start[0], 2), **made}))  # fmt: skip


if __name__ == "__main__":
    main()
