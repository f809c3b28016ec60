"""`stillroom record` as a process: what it prints, kills, and the way to rollouts."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes.raw_endpoint import CHUNK_END, STREAM_HEAD, RawEndpoint, chunk, json_reply
from fakes.recording import CHAT, RawClient, calls_in, request, wait_until
from stillroom.api.spending import limit_budget
from stillroom.errors import InputError
from stillroom.processes import end_process
from stillroom.settings import Workspace
from stillroom_mcp.cli import main

TOKEN = "the-token-of-these-tests"


@contextmanager
def started(
    root: Path, *arguments: str, **variables: str
) -> Iterator[tuple[dict, subprocess.Popen]]:
    """The command in a process of its own, and the JSON of its first line."""
    command = [sys.executable, "-P", "-m", "stillroom_mcp", "record", "--workspace", str(root)]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield json.loads(process.stdout.readline()), process
        finally:
            end_process(process)


def test_the_command_says_what_clients_set_and_ends_with_the_calls_it_has(tmp_path):
    held = threading.Event()

    def script(sent):
        yield STREAM_HEAD + chunk(b"data: {}\n\n")
        if b"slow" in sent.body:
            held.wait(10)
        yield CHUNK_END

    token_file = tmp_path / "the_token"
    token_file.write_text(TOKEN, encoding="ascii")
    token_file.chmod(0o600)
    with (
        RawEndpoint(script) as endpoint,
        started(
            tmp_path, "--upstream", f"{endpoint.url}/v1", "--port", "0", "--output", "t/u",
            "--token-file", str(token_file),
        ) as (said, process),
    ):  # fmt: skip
        address = said["recording"]
        assert said == {
            "recording": address,
            "output": "t/u",
            "token": str(token_file),
            "upstreams": [
                {
                    "name": "upstream",
                    "upstream": endpoint.url,
                    "openai_base_url": f"{address}/v1",
                    "anthropic_base_url": address,
                }
            ],
        }
        assert request(address, "POST", CHAT, b"{}").status == 401
        path = f"/token/{TOKEN}{CHAT}"
        assert request(address, "POST", path, b"{}").status == 200
        with RawClient(address) as client:
            client.send("POST", path, b'"slow"')
            wait_until(lambda: len(endpoint.requests) == 2)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: _refuses(address))
            held.set()
            assert client.read().is_whole
            assert process.wait(20) == 0
        printed = process.stderr.read()
    assert f"OpenAI clients: base_url={address}/token/TOKEN/v1 (OPENAI_BASE_URL)" in printed
    assert "waiting up to 10 s for 1 calls to end" in printed
    assert "recorded 2 calls in t/u" in printed
    assert TOKEN not in printed
    assert [call.end for call in calls_in(tmp_path / "t/u")] == ["whole"] * 2


def test_a_folders_calls_keep_to_a_budget_whatever_is_started_again(tmp_path):
    (tmp_path / "prices.yml").write_text("m: {input: 0, output: 1000000}\n", encoding="utf-8")
    reply = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    body = json.dumps({"model": "m", "messages": [], "max_tokens": 2}).encode()
    statuses, printed = [], []
    with RawEndpoint(lambda _: json_reply(json.dumps(reply).encode())) as endpoint:
        for _ in range(2):
            flags = ("--upstream", endpoint.url, "--port", "0", "--budget-usd", "5")
            with started(tmp_path, *flags) as (said, process):
                url = said["recording"]
                statuses += [request(url, "POST", CHAT, body).status for _ in range(2)]
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
                printed.append(process.stderr.read())
        assert len(endpoint.requests) == 2
    assert statuses == [200, 200, 402, 402]
    assert "the calls in this folder have cost $0 of $5" in printed[0]
    assert "recorded 2 calls in traces; the calls in this folder have cost $4 of $5" in printed[0]
    assert "the calls in this folder have cost $4 of $5" in printed[1]


def test_a_recorder_and_the_runs_share_the_workspaces_budget(tmp_path):
    prices = "m: {input: 0, output: 1000000}\nworkspace: {budget_usd: 5}\n"
    (tmp_path / "prices.yml").write_text(prices, encoding="utf-8")
    reply = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    workspace = Workspace(tmp_path)

    def call(url: str, model: str = "m") -> int:
        body = json.dumps({"model": model, "messages": [], "max_tokens": 2}).encode()
        return request(url, "POST", CHAT, body).status

    with RawEndpoint(lambda _: json_reply(json.dumps(reply).encode())) as endpoint:
        where = ("--upstream", endpoint.url, "--port", "0")
        with started(tmp_path, *where, "--budget-usd", "3") as (said, process):
            assert limit_budget(workspace, None)[0] == pytest.approx(2)
            assert [call(said["recording"]) for _ in range(2)] == [200, 402]
            end(process)
        # It has cost two dollars, also while it runs with a budget below that.
        with started(tmp_path, *where, "--budget-usd", "1") as (said, process):
            assert limit_budget(workspace, None)[0] == pytest.approx(3)
            assert call(said["recording"]) == 402
            end(process)
        # Another one may spend the other three, whatever it is given.
        assert limit_budget(workspace, None)[0] == pytest.approx(3)
        flags = ("--output", "more", "--budget-usd", "50")
        with started(tmp_path, *where, *flags) as (said, process):
            with pytest.raises(InputError, match=r"used or reserved \$5.00 of the \$5"):
                limit_budget(workspace, None)
            assert [call(said["recording"]) for _ in range(2)] == [200, 402]
            printed = end(process)
        assert "this may cost up to $3: $2 of the $5 that the workspace's runs may cost" in printed
        # Without a budget of its own, a recorder for this machine reserves nothing.
        with started(tmp_path, *where) as (said, process):
            assert limit_budget(workspace, None)[0] == pytest.approx(1)
            assert [call(said["recording"], name) for name in ("m", "unlisted")] == [402, 200]
            assert request(said["recording"], "POST", "/v1/embeddings", b"{}").status == 200
            end(process)


def end(process: subprocess.Popen) -> str:
    """Ends the command as a user does, and returns what it has printed."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    return process.stderr.read()


def _refuses(address: str) -> bool:
    try:
        RawClient(address).close()
    except ConnectionError:
        return True
    return False


def test_a_killed_recorder_has_lost_no_call_that_ended(tmp_path):
    """More of the same: benchmarks/recording/kills.py."""
    ended: list[bytes] = []
    is_stopping = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def call_on_and_on(name: int) -> None:
        number = 0
        while not is_stopping.is_set():
            number += 1
            body = b'{"text":"%d %d"}' % (name, number)
            try:
                if request(f"http://127.0.0.1:{port}", "POST", CHAT, body).body == b'"ok"':
                    ended.append(body)
            except (OSError, IndexError):
                is_stopping.wait(0.1)

    threads = [threading.Thread(target=call_on_and_on, args=(name,)) for name in range(4)]
    with RawEndpoint(lambda _: [0.005, json_reply(b'"ok"')]) as endpoint:
        for thread in threads:
            thread.start()
        for _ in range(2):
            num_before = len(ended)
            with started(tmp_path, "--upstream", endpoint.url, "--port", str(port)):
                wait_until(lambda n=num_before: len(ended) >= n + 20)
        is_stopping.set()
        for thread in threads:
            thread.join(10)
    journal = tmp_path / "traces" / "calls-0001.jsonl"
    lines = journal.read_bytes().split(b"\n")
    recorded = [json.loads(line)["request"]["content"]["text"].encode() for line in lines[:-1]]
    assert set(ended) <= set(recorded)
    assert len(set(recorded)) == len(recorded)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "no upstream was given"),
        (("--upstream", "openai", "--replay", "."), "--replay calls no upstream"),
        (("--upstream", "http://a:b@c.example"), "contains a login"),
        (("--upstream", "http://c.example/?key=1"), "has a query"),
        (("--upstream", "opnai"), "neither a known provider nor a URL"),
        (("--upstream", "openai", "http://c.example"), "needs a name"),
        (("--upstream", "openai", "openai=http://c.example"), "two upstreams are named"),
        (("--upstream", "openai", "--output", "../x"), "is outside the workspace"),
        (("--upstream", "openai", "--max-body-mb", "0"), "--max-body-mb"),
        (("--upstream", "openai", "--host", "0.0.0.0"), "from other machines"),  # noqa: S104
        (("--replay", "nothing-here"), "does not exist"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_what_to_do(
    tmp_path, capsys, monkeypatch, arguments, problem
):
    monkeypatch.delenv("STILLROOM_TOKEN", raising=False)
    with pytest.raises(SystemExit) as ending:
        main(["record", "--workspace", str(tmp_path), "--port", "0", *arguments])
    printed = capsys.readouterr().err
    assert ending.value.code == 1
    assert problem in printed
    assert "fix: " in printed
    assert not (tmp_path / "traces").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_upstream_that_is_the_recorder_itself_is_refused(tmp_path, capsys, free_tcp_port, host):
    upstream = f"http://{host}:{free_tcp_port}"
    options = ["--port", str(free_tcp_port), "--upstream", "openai", f"me={upstream}"]
    with pytest.raises(SystemExit):
        main(["record", "--workspace", str(tmp_path), *options])
    assert f"the upstream {upstream} is this proxy itself" in capsys.readouterr().err
    assert not (tmp_path / "traces").exists()
