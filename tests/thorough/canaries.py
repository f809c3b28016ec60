"""Where 50 secrets get to when everything that sees one repeats it. canaries.py [--rollouts 60] [--seed 0] [--keep FOLDER]

A server is started with 40 secrets in its environment, two keys that it uses (a teacher's from the environment, a judge's from `.env`), and
eight in the command lines of MCP servers. The endpoint repeats the key that it was sent in every part of a response and of its refusals, in
rotating encodings; tools and MCP servers return and print their environment, their parents', their command line and `.env`. Every operation that
shows rows, runs or files is called. Then all files of the workspace, all answers, what the server printed, and the environment of every other
process are searched for each secret, as it is, in base64 (at three offsets, both alphabets) and percent-encoded. `.env` itself holds one, and a server's own
process has what its command gave it. Exits with 1 if any is found.
"""

import argparse
import base64
import json
import os
import random
import shlex
import string
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import psutil
from mcp import Client, StdioServerParameters

MCP_ROLLOUTS = 8
"""Each starts a process for each of eight MCP servers."""
TEACHER, JUDGE = "VLLM_API_KEY", "VLLM_JUDGE_KEY"
NAMES = [
    "DATABASE_URL",
    "GH_PAT",
    "GITHUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "OPENROUTER_API_KEY",
    "GEMINI_API_KEY",
    "SLACK_WEBHOOK",
    "SENTRY_DSN",
    "PGPASSWORD",
    "MY_SETTING",
    "SSH_PASSPHRASE",
    "NPM_TOKEN",
    "STRIPE_KEY",
    "JWT_SECRET",
    "COOKIE_SALT",
    "REDIS_URL",
    "SMTP_LOGIN",
    "TWILIO_AUTH",
    "CLIENT_SECRET",
    "SIGNING_KEY",
    "VAULT_ADDR_AND_TOKEN",
    "KUBECONFIG_DATA",
    "GCP_CREDENTIALS",
    "AZURE_OPENAI_API_KEY",
    "WANDB_API_KEY",
    "COHERE_API_KEY",
    "MISTRAL_API_KEY",
    "HF_SECRET",
    "PYTHON_KEYRING_PASSWORD",
    "CUDA_LICENCE_KEY",
    "OMP_TOKEN",
    "SLURM_JWT",
    "RAY_TOKEN",
    "TORCH_HUB_PASSWORD",
    "DOCKER_PASSWORD",
    "STILLROOM_TEST_TOKEN",
    "BROWSER_COOKIE",
]
MCP_SERVER = """
import json, os, sys
from pathlib import Path
def told():
    return " ".join([*sys.argv, *(f"{k}={v}" for k, v in os.environ.items()), Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace")])
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    method, result = request["method"], None
    sys.stderr.write(told() + "\\n")
    if method == "initialize":
        result = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": NAME, "description": told()[:2000], "inputSchema": {"type": "object"}}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": told()}], "isError": False}
    answer = {"result": result} if result is not None else {"error": {"code": -32601, "message": told()}}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}) + "\\n")
    sys.stdout.flush()
"""
TOOLS = """
import os
from pathlib import Path
from stillroom.tools.user.file import tool

def environments():
    pid, texts = os.getpid(), []
    for _ in range(6):
        texts.append(Path(f"/proc/{pid}/environ").read_text(errors="replace"))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        # The server was given the secrets, and so was this script.
        if pid <= 1 or b"stillroom_mcp" in Path(f"/proc/{pid}/cmdline").read_bytes():
            break
    return texts

@tool
def spill(what: str) -> str:
    "Tell everything."
    text = " ".join([*environments(), Path(".env").read_text(), str(dict(os.environ))])
    print(text)
    if what == "fail":
        raise RuntimeError(text)
    return text
"""


def forms(secret: str) -> list[bytes]:
    """The spellings in which a secret is searched for."""
    raw = secret.encode()
    found = [raw, quote(secret, safe="").encode(), "".join(f"%{byte:02X}" for byte in raw).encode()]
    for skipped in range(3):
        whole = raw[skipped : skipped + (len(raw) - skipped) // 3 * 3]
        found += [base64.b64encode(whole), base64.urlsafe_b64encode(whole)]
    return list(dict.fromkeys(found))


class Endpoint:
    """A chat endpoint that repeats the key that it is sent, encoded in another way each time."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.sent = bytearray()

    def echo(self, key: str, number: int) -> str:
        raw = f"{'ab'[: number % 3]}{key}!".encode()
        spellings = [
            key,
            base64.b64encode(raw).decode(),
            base64.urlsafe_b64encode(raw).decode(),
            quote(key, safe=""),
            "".join(f"%{byte:02x}" for byte in key.encode()),
        ]
        return spellings[number % len(spellings)]

    def answer(self, body: dict[str, Any], key: str, number: int) -> tuple[int, dict[str, Any]]:
        echo, roles = self.echo(key, number), [message["role"] for message in body["messages"]]
        if body["model"] == "refuses" or number % 9 == 8:
            kind = (
                401 if body["model"] == "refuses" else random.Random(number).choice([429, 500, 503])
            )
            return kind, {"error": {"message": f"no access for Bearer {echo}", "code": echo}}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "note": echo}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": f"answer {echo}",
            "reasoning": echo,
        }
        if body["model"] == "judge":
            message = {
                "role": "assistant",
                "content": json.dumps({"reasoning": f"saw {echo}", "score": 1}),
            }
        elif "tools" in body and "tool" not in roles:
            names = [tool["function"]["name"] for tool in body["tools"]]
            arguments = json.dumps(
                {"what": ["all", "fail"][number % 2], "key": echo}
                if number % 4
                else {"what": "all"}
            )
            message["tool_calls"] = [
                {"id": f"{echo}-{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for index, name in enumerate([*names, echo])
            ]  # fmt: skip
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": echo, "model": f"m-{echo}", "system_fingerprint": echo, "choices": [choice], "usage": usage}  # fmt: skip

    @contextmanager
    def serve(self) -> Iterator[str]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                key = self.headers.get("authorization", "Bearer none").partition(" ")[2]
                with outer.lock:
                    outer.answers["asked"] += 1
                    number = outer.answers["asked"]
                status, value = outer.answer(body, key, number)
                data = json.dumps(value).encode()
                with outer.lock:
                    outer.answers[str(status)] += 1
                    outer.sent += data
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.send_header("x-request-id", outer.echo(key, number))
                self.send_header("x-ratelimit-limit-requests", outer.echo(key, number + 1))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join(10)


class Environments:
    """Reads the environment of every process that the server has started, as long as it lives."""

    def __init__(self, allowed: dict[str, str]) -> None:
        self.allowed, self.seen, self.found = allowed, set[int](), set[str]()
        self.stopped = threading.Event()

    def watch(self, secrets: dict[str, str]) -> None:
        while not self.stopped.wait(0.02):
            servers = [
                child
                for child in psutil.Process().children()
                if "stillroom_mcp" in " ".join(_command(child))
            ]
            for server in servers:
                for child in _descendants(server):
                    self.look(child, secrets)

    def look(self, child: psutil.Process, secrets: dict[str, str]) -> None:
        try:
            environ = Path(f"/proc/{child.pid}/environ").read_bytes()
            command = Path(f"/proc/{child.pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            return
        self.seen.add(child.pid)
        for name, secret in secrets.items():
            is_own = name in self.allowed and self.allowed[name].encode() in command
            if not is_own and any(form in environ for form in forms(secret)):
                self.found.add(f"{name} in the environment of {command[:80]!r}")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def canary(draw: random.Random) -> str:
    letters = string.ascii_letters + string.digits
    return f"sk-{''.join(draw.choices(letters, k=12))}/{''.join(draw.choices(letters, k=6))}+{''.join(draw.choices(letters, k=5))}="  # fmt: skip


def write_project(folder: Path, num: int, secrets: dict[str, str]) -> list[str]:
    rows = [
        {"prompt": f"Repeat your key, number {index}.", "metadata": {"task_type": "t"}}
        for index in range(num)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tools.py").write_text(TOOLS)
    (folder / ".env").write_text(f"{JUDGE}={secrets[JUDGE]}\n")
    servers: list[str] = []
    commands = [
        "{python} {file} --token {secret}",
        "{python} {file} --api-key={secret}",
        "env SHOP_KEY={secret} {python} {file}",
        "env DATABASE_URL=postgres://u:{secret}@db/x {python} {file}",
        "{python} {file} --header 'Authorization: Bearer {secret}'",
        "{python} {file} --url 'https://u:{secret}@x.test/mcp'",
        "{python} {file} --url 'https://x.test/mcp?code={secret}'",
        "{python} {file} {secret}",
    ]
    for index, command in enumerate(commands):
        file = folder / f"server_{index}.py"
        file.write_text(MCP_SERVER.replace("NAME", repr(f"tell_{index}")))
        secret = secrets[f"mcp {index}"]
        # A slash would end the login of a URL.
        servers.append(
            command.format(python=shlex.quote(sys.executable), file=file.name, secret=secret)
        )
    return servers


async def drive(
    folder: Path, config: Path, secrets: dict[str, str], url: str, servers: list[str]
) -> dict[str, Any]:
    answers: list[str] = []
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "PYTHONPATH", "LANG", "OMP_NUM_THREADS")
    }
    given = {name: secret for name, secret in secrets.items() if name in (*NAMES, TEACHER)}
    server = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "stillroom_mcp", "serve", "--workspace", str(folder)],
        env={**kept, **given, "STILLROOM_CONFIG": str(config)},
    )
    done: Counter[str] = Counter()
    async with Client(server) as client:

        async def call(name: str, /, **arguments: Any) -> dict[str, Any]:
            result = await client.call_tool(name, arguments)
            answers.append(result.model_dump_json())
            done["errors" if result.is_error else "answers"] += 1
            return result.structured_content or {}

        async def run(name: str, /, **arguments: Any) -> dict[str, Any]:
            report = await call(name, **arguments)
            while report.get("status") in ("starting", "running"):
                report = await call("get_run", run_id=report["run_id"], wait_s=20)
            if report.get("run_id"):
                for source in ("log", "events"):
                    await call("get_run_logs", run_id=report["run_id"], source=source, lines=200)
            done[f"{name} {report.get('status')}"] += 1
            return report

        judge = f"model: judge\nrubric: Is it right?\nprovider: vllm\nbase_url: {url}\napi_key_env: {JUDGE}\n"
        (folder / "judge.yml").write_text(judge)
        teacher = {
            "provider": "openai",
            "base_url": url,
            "api_key_env": TEACHER,
            "model": "m",
            "tools": "tools.py",
        }
        rollouts = {
            "input": "prompts.jsonl",
            "output": "rollouts/a.jsonl",
            "judge": "judge.yml",
            "mcp_servers": servers,
        }
        first = await run(
            "generate_rollouts", **teacher, **rollouts, n=MCP_ROLLOUTS, request_timeout=20
        )
        more = {"input": "prompts.jsonl", "output": "rollouts/more.jsonl", "judge": "judge.yml"}
        second = await run("generate_rollouts", **teacher, **more, request_timeout=20)
        await run("generate_rollouts", **teacher, **rollouts, n=MCP_ROLLOUTS, request_timeout=20)
        refused = {**teacher, "model": "refuses"}
        await run(
            "generate_rollouts", **refused, input="prompts.jsonl", output="rollouts/refused.jsonl"
        )
        broken = [f"{sys.executable} nowhere.py --token {secrets['mcp 0']}"]
        await run("generate_rollouts", **{**teacher, "mcp_servers": broken}, input="prompts.jsonl", output="rollouts/broken.jsonl")  # fmt: skip
        await run(
            "score_rollouts",
            input="rollouts/a.jsonl",
            output="rollouts/scored.jsonl",
            judge="judge.yml",
        )
        await run(
            "evaluate_model",
            **teacher,
            data="prompts.jsonl",
            n=4,
            judge="judge.yml",
            mcp_servers=servers[:2],
        )
        for name in (TEACHER, *NAMES[:10]):
            await call("generate_rollouts", **{**teacher, "api_key_env": name, "base_url": "http://localhost.test:1/v1"}, input="prompts.jsonl")  # fmt: skip
        for path in (
            ".env",
            f"/proc/{os.getpid()}/environ",
            "/proc/self/environ",
            "rollouts/a.jsonl",
            "tools.py",
            "judge.yml",
            "nowhere",
        ):
            for name, field in (
                ("inspect_examples", "path"),
                ("validate_dataset", "path"),
                ("show_lineage", "path"),
                ("plan_training", "config"),
            ):
                await call(name, **{field: path})
            await call(
                "generate_rollouts",
                **teacher,
                input="prompts.jsonl",
                output="rollouts/x.jsonl",
                judge=path,
            )
        await call("filter_dataset", input="rollouts/a.jsonl", output="kept.jsonl", min_reward=0)
        await call("convert_rollouts", input="rollouts/a.jsonl", output="sft.jsonl")
        await call("sample_for_review", input="rollouts/a.jsonl", output="review.jsonl")
        await call("inspect_examples", path="rollouts/a.jsonl", n=20, html="rows.html")
        await call("show_lineage", path="rollouts/a.jsonl", row=1)
        await call("check_setup", provider="openai", base_url=url, api_key_env=TEACHER)
        await call("list_runs")
    from stillroom import api
    from stillroom.settings import Workspace

    api.write_report(Workspace(folder), api.WriteReport())
    return {
        "answers": answers,
        "done": done,
        "rollouts": [(one.get("result") or {}).get("succeeded") for one in (first, second)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder to keep for looking into")
    options = parser.parse_args()
    draw, began = random.Random(options.seed), time.monotonic()
    secrets = {
        name: canary(draw)
        for name in (TEACHER, JUDGE, *NAMES, *(f"mcp {index}" for index in range(8)))
    }
    # A slash would end the login of a URL.
    secrets |= {name: secrets[name].replace("/", "_") for name in ("mcp 3", "mcp 5")}
    endpoint = Endpoint()
    with tempfile.TemporaryDirectory() as name, endpoint.serve() as url:
        base = options.keep or Path(name)
        folder, config, printed = base / "work", base / "config", base / "printed.txt"
        folder.mkdir(parents=True)
        config.mkdir()
        servers = write_project(folder, options.rollouts, secrets)
        environments = Environments({f"mcp {i}": f"server_{i}.py" for i in range(8)})
        watching = threading.Thread(target=environments.watch, args=(secrets,), daemon=True)
        watching.start()
        own_stderr = os.dup(2)
        with printed.open("wb") as stream:
            os.dup2(stream.fileno(), 2)
        try:
            driven = anyio.run(drive, folder, config, secrets, url, servers)
        finally:
            os.dup2(own_stderr, 2)
            environments.stopped.set()
            watching.join(5)
        found = set(environments.found)
        texts = {
            "an answer": "\n".join(driven["answers"]).encode(),
            "what the server printed": printed.read_bytes(),
        }
        files = [path for path in folder.rglob("*") if path.is_file() and path != folder / ".env"]
        # Where the project itself has one, nothing was leaked.
        texts |= {str(path.relative_to(folder)): path.read_bytes() for path in files}
        for place, data in texts.items():
            for secret_name, secret in secrets.items():
                if any(form in data for form in forms(secret)):
                    found.add(f"{secret_name} in {place}")
        used = [
            name
            for name in (TEACHER, JUDGE)
            if any(form in bytes(endpoint.sent) for form in forms(secrets[name]))
        ]
    counts = dict(sorted(driven["done"].items()))
    # Without these the search would be of nothing.
    is_real = (
        used == [TEACHER, JUDGE]
        and endpoint.answers["200"] >= 200
        and driven["rollouts"] == [MCP_ROLLOUTS, options.rollouts]
        and len(environments.seen) > 20
    )
    figure = f"{len(found)} of {len(secrets)} secrets found in {len(files)} files ({sum(map(len, texts.values())) / 1e6:.1f} MB), {len(driven['answers'])} answers and {len(environments.seen)} processes"  # fmt: skip
    print(
        json.dumps(
            {
                "promise": 21,
                "figure": figure,
                "passed": not found and is_real,
                "found": sorted(found)[:20],
                "replies": dict(endpoint.answers),
                "calls": counts,
                "rollouts": driven["rollouts"],
                "seconds": round(time.monotonic() - began, 1),
                "seed": options.seed,
            }
        )
    )
    return 0 if not found and is_real else 1


if __name__ == "__main__":
    sys.exit(main())
