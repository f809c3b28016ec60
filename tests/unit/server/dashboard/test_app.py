"""The dashboard's addresses: who gets in, what every answer forbids, and what pages say."""

import json
import socket
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fakes.dashboards import TOKEN, client_of, kept_running
from fakes.rollout_rows import assistant, rollout_row, tool_call, tool_reply, user, write_rows
from fakes.run_folders import evaluate, write_run, write_training
from stillroom.errors import InputError
from stillroom.files import write_json
from stillroom.settings import Workspace
from stillroom_mcp.dashboard.app import build_dashboard, listen

ATTACK = "<script>document.title='owned'</script><img src=x onerror=1>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard")
    runs = folder / "runs"
    evaluate(runs, "base", set(range(6)), minute=0)
    evaluate(runs, "after", set(range(24)), minute=3)
    write_training(runs, "sft-a", [{"loss": 2 / step} for step in range(1, 9)], minute=1)
    write_training(runs, "sft-b", [{"loss": 3 / step} for step in range(1, 9)], minute=2)
    write_run(runs, "dpo-b", minute=4, status="failed", error={"problem": ATTACK, "fix": ATTACK})
    talk = [user(ATTACK), assistant(None, tool_call(arguments='{"item": "' + ATTACK + '"}'))]
    talk.append(tool_reply("7"))
    rows = [rollout_row(task_id=f"t{n}", reward=n / 60, messages=talk) for n in range(60)]
    write_rows(folder / "rows.jsonl", rows)
    (folder / ".env").write_text("TEACHER_API_KEY=sk-a-secret-of-this-test\n", encoding="utf-8")
    (folder / "notes.jsonl").write_text('{"password": "sesame"}\n', encoding="utf-8")
    write_rows(folder / "leak.jsonl", [rollout_row(messages=[user("sk-a-secret-of-this-test")])])
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return client_of(folder)


ADDRESSES = [
    "/", "/parts/runs", "/runs/sft-a", "/runs/sft-a/live", "/runs/sft-a/metrics",
    "/runs/sft-a/log", "/evaluations", "/compare", "/compare?a=sft-a&b=sft-b",
    "/compare?a=evaluate-base&b=evaluate-after", "/data", "/data/file?path=rows.jsonl",
    "/rows?path=rows.jsonl", "/rows?path=rows.jsonl&show=wrong&q=x",
    "/row?path=rows.jsonl&at=0&number=1",
    "/lineage", "/lineage?path=rows.jsonl", "/static/dashboard.css", "/static/THIRD_PARTY.txt",
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_address_answers_those_who_have_the_token_alone(
    folder: Path, client: TestClient, address: str
) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    assert ATTACK not in answer.text
    stranger = TestClient(
        build_dashboard(Workspace(folder), TOKEN), base_url="http://127.0.0.1:8484"
    )
    for refused in (
        stranger.get(address),
        client.get(address, headers={"host": "evil.example"}),
        client.get(address, headers={"origin": "http://127.0.0.1:1"}),
    ):
        assert refused.status_code in (401, 403)
        assert "default-src 'none'" in refused.headers["content-security-policy"]


def test_no_answer_lets_a_page_run_or_load_anything_foreign(client: TestClient) -> None:
    headers = client.get("/").headers
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(folder: Path) -> None:
    app = build_dashboard(Workspace(folder), TOKEN)
    with TestClient(app, base_url="http://127.0.0.1:8484") as stranger:
        answer = stranger.get(f"/?token={TOKEN}")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in cookie
    assert TOKEN not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(client: TestClient, method: str) -> None:
    assert {client.request(method, address).status_code for address in ADDRESSES} == {405}


@pytest.mark.parametrize(
    "address",
    [
        "/rows?path=../x.jsonl", "/rows?path=.env", "/rows?path=/etc/passwd",
        "/row?path=rows.jsonl&at=5", "/row?path=rows.jsonl&at=99999999999999999",
        "/row?path=rows.jsonl&at=minus", "/runs/nothing",
        "/runs/..%2f..%2fetc", "/compare?a=none&b=none", "/lineage?path=/etc/passwd",
        "/data/file?path=gone.jsonl", "/row/tokens?path=rows.jsonl&at=0", "/static/app.py",
        "/static/..%2fapp.py",
    ],
)  # fmt: skip
def test_what_cannot_be_shown_says_so(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text


def test_a_file_that_the_system_refuses_is_a_page_that_says_so(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", "rows.jsonl")

    monkeypatch.setattr("stillroom_mcp.dashboard.app.rows_page", refuse)
    answer = client.get("/rows?path=rows.jsonl")
    assert answer.status_code == 404
    assert "Permission denied" in answer.text


def test_a_file_that_is_no_data_is_not_quoted(client: TestClient) -> None:
    for address in ("/rows?path=notes.jsonl", "/row?path=notes.jsonl&at=0&number=1"):
        assert "sesame" not in client.get(address).text


def test_a_secret_that_rows_repeat_is_not_shown(client: TestClient) -> None:
    for address in ("/rows?path=leak.jsonl", "/row?path=leak.jsonl&at=0&number=1"):
        assert "sk-a-secret" not in client.get(address).text


def test_the_live_part_of_a_run_asks_again_until_the_run_has_ended(
    tmp_path: Path, client: TestClient
) -> None:
    write_training(tmp_path / "runs", "sft-now", [{"loss": 2.0}], status="running")
    with kept_running(tmp_path / "runs" / "sft-now"):
        open_client = client_of(tmp_path)
        assert "every 1s" in open_client.get("/runs/sft-now/live").text
        assert "the curves will appear here" in open_client.get("/runs/sft-now").text
        assert open_client.get("/runs/sft-now/metrics").json()["is_final"] is False
    assert "every 1s" not in client.get("/runs/sft-a/live").text
    assert "No steps were recorded" in client.get("/runs/evaluate-base").text
    metrics = client.get("/runs/sft-a/metrics").json()
    assert metrics["is_final"] is True
    assert metrics["values"]["loss"][:2] == [2.0, 1.0]


def test_two_evaluations_are_compared_in_pairs(client: TestClient) -> None:
    page = client.get("/compare?a=evaluate-base&b=evaluate-after").text
    assert "points on 30\xa0shared tasks (95 % interval" in page
    assert "Wrong before, right after" in page


def test_a_page_names_the_command_that_starts_the_run_again(folder: Path) -> None:
    run = write_run(folder / "runs", "rollouts-c", minute=5, result={"requested": 1})
    request = {"input": "prompts.jsonl", "output": "out.jsonl", "seed": None, "browse": False}
    document = {"kind": "rollouts", "workspace": str(folder), "request": request}
    write_json(run / "request.json", document)
    page = client_of(folder).get("/runs/rollouts-c").text
    assert "stillroom generate-rollouts" in page
    assert "--input prompts.jsonl" in page
    assert "--browse" not in page


def test_rows_say_how_they_ended(client: TestClient) -> None:
    page = client.get("/rows?path=rows.jsonl&row=51").text
    assert "rows 51 to 60 of 60" in page
    assert json.dumps(ATTACK)[1:-1] not in page
    assert "✓ right" in page


def test_it_listens_on_the_loopback_alone() -> None:
    with listen(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_refused_with_a_way_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(InputError, match="cannot be used") as refused:
            listen(other.getsockname()[1])
        assert "--port" in refused.value.fix


def test_a_number_that_is_no_port_is_refused() -> None:
    with pytest.raises(InputError, match="there is no port 70000"):
        listen(70000)
