"""Writes the sample of the AI SDK for TypeScript with the SDK itself.

`PYTHONPATH=scripts python -m trace_samples.make_ai_sdk FOLDER`, where the folder has the packages
ai@5, @ai-sdk/openai@2, @opentelemetry/sdk-trace-base@1, @opentelemetry/sdk-trace-node@1,
@opentelemetry/otlp-transformer@0.57 and zod@3 in its node_modules.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from trace_samples.conversation import (
    FIRST,
    IMAGE,
    REPLIES,
    RESULTS,
    SECOND,
    SYSTEM,
    tool_schemas,
)
from trace_samples.files import SAMPLES, write_rows
from trace_samples.make_spans import tidy
from trace_samples.scripted_endpoint import ScriptedEndpoint, in_order

_NAME = "otel_genai/ai_sdk.jsonl"


def main(folder: Path) -> None:
    """Writes the sample."""
    script = shutil.copy(Path(__file__).with_name("ai_sdk.mjs"), folder)
    conversation = {
        "system": SYSTEM,
        "first": FIRST,
        "second": SECOND,
        "image": IMAGE,
        "results": RESULTS,
        "tools": tool_schemas(),
    }
    with ScriptedEndpoint(in_order(REPLIES)) as endpoint:
        command = ["node", script, endpoint.url, json.dumps(conversation)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert len(endpoint.seen) == len(REPLIES)  # noqa: S101 - the sample would lack a call
    write_rows(_NAME, [json.loads(line) for line in ended.stdout.splitlines()])
    tidy(SAMPLES / _NAME, endpoint.url)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
