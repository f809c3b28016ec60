"""What recorders cost, as the budget of a workspace counts it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from fakes.raw_endpoint import STREAM_HEAD, RawEndpoint, chunk, json_reply
from fakes.recording import CHAT, RawClient, in_thread, recording, request
from fakes.waiting import wait_until
from stillroom.api import recorders
from stillroom.api.recorders import (
    RecorderCost,
    budget_of_calls,
    cost_at_start,
    recorders_usd,
    write_cost,
)
from stillroom.api.spending import limit_budget
from stillroom.errors import DataError, InputError
from stillroom.files import read_json
from stillroom.recording import journal as journals
from stillroom.recording import proxy
from stillroom.recording.admission import Admission, RefusedError
from stillroom.recording.journal import CallJournal
from stillroom.recording.proxy import RecordingProxy
from stillroom.recording.upstreams import parse_upstreams
from stillroom.settings import Workspace
from stillroom.teachers.pricing import Price, price_for
from stillroom_mcp.http.record import limited_recording

PRICES = "m: {input: 0, output: 1000000}\nworkspace: {budget_usd: 20}\n"
PAID_CALL = json.dumps({"model": "m", "messages": [], "max_tokens": 4}).encode()
REPLY = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "prices.yml").write_text(PRICES, encoding="utf-8")
    return Workspace(tmp_path)


def record(folder: Path, num_calls: int) -> None:
    """Records calls of two dollars each."""
    body = json.dumps({"model": "m", "messages": [], "max_tokens": 2}).encode()
    reply = json_reply(json.dumps(REPLY).encode())
    with RawEndpoint(lambda _: reply) as endpoint, recording(folder, endpoint.url) as url:
        for _ in range(num_calls):
            assert request(url, "POST", CHAT, body).status == 200


def test_a_recorder_counts_with_its_budget_while_it_runs_and_then_with_its_calls(
    workspace: Workspace,
) -> None:
    folder = workspace.root / "traces"
    assert recorders_usd(workspace) == 0
    record(folder, 2)
    journal = CallJournal(folder)
    write_cost(workspace, RecorderCost(folder="traces", budget_usd=15.0))
    assert limit_budget(workspace, None)[0] == pytest.approx(5)
    # One that was started without a budget counts with what it has forwarded so far.
    write_cost(workspace, RecorderCost(folder="traces"))
    assert recorders_usd(workspace) == 4

    # A killed recorder leaves its budget, and its journal tells what it has cost.
    write_cost(workspace, RecorderCost(folder="traces", budget_usd=15.0))
    journal.close()
    # It counts with its budget as long as its folder is a link.
    folder.rename(workspace.root / "elsewhere")
    folder.symlink_to("elsewhere")
    assert recorders_usd(workspace) == 15
    folder.unlink()
    (workspace.root / "elsewhere").rename(folder)
    assert recorders_usd(workspace) == 4
    shutil.rmtree(folder)
    assert recorders_usd(workspace) == 4

    write_cost(workspace, RecorderCost(folder="traces", spent_usd=25.0))
    with pytest.raises(InputError, match=r"have used or reserved \$25\.00 of the \$20") as caught:
        limit_budget(workspace, None)
    assert "stillroom record" in caught.value.fix


def test_what_was_recorded_counts_after_its_files_are_deleted(workspace: Workspace) -> None:
    folder = workspace.root / "traces"
    write_cost(workspace, RecorderCost(folder="traces", spent_usd=3.0, deleted_usd=1.0))
    cost = cost_at_start(workspace, folder)
    assert cost == RecorderCost(folder="traces", deleted_usd=4.0)

    # Without its folder, nobody knows what a killed recorder has spent of its budget.
    write_cost(workspace, RecorderCost(folder="traces", budget_usd=5.0, deleted_usd=1.0))
    assert recorders_usd(workspace) == 6
    assert cost_at_start(workspace, folder).deleted_usd == 6

    record(folder, 1)
    assert cost_at_start(workspace, folder).deleted_usd == 1
    assert recorders_usd(workspace) == 3


@pytest.mark.parametrize("usd", [5.0, None])
def test_what_was_recorded_counts_after_some_of_its_journals_are_deleted(
    workspace: Workspace, usd: float | None
) -> None:
    folder = workspace.root / "traces"
    record(folder, 1)
    # The journal with three more dollars is gone, or calls of that cost could not be written.
    write_cost(workspace, RecorderCost(folder="traces", spent_usd=5.0, deleted_usd=1.0))
    (workspace.root / "prices.yml").write_text(PRICES.replace("20", "30"), encoding="utf-8")
    with limited_recording(workspace, folder, usd, is_local=False):
        assert recorders_usd(workspace) == 4.0 + (usd or 26.0)
    assert recorders_usd(workspace) == 6
    (workspace.root / "prices.yml").write_text(PRICES.partition("\n")[0], encoding="utf-8")
    with limited_recording(workspace, folder, None, is_local=False):
        assert recorders_usd(workspace) == 6


def test_calls_that_are_not_settled_count_when_their_recorder_ends(workspace: Workspace) -> None:
    folder = workspace.root / "traces"
    with limited_recording(workspace, folder, 5.0, is_local=False) as (_, budget):
        assert budget is not None
        body = json.dumps({"model": "m", "messages": [], "max_tokens": 2}).encode()
        anyio.run(budget.reserve, body)
    assert recorders_usd(workspace) == 2


def test_calls_that_were_in_flight_when_their_recorder_was_killed_count_as_paid(
    workspace: Workspace,
) -> None:
    folder = workspace.root / "traces"
    body = json.dumps({"model": "m", "messages": [], "max_tokens": 2}).encode()
    with limited_recording(workspace, folder, 15.0, is_local=False) as (_, budget):
        assert budget is not None
        anyio.run(budget.reserve, body)
        [document] = (workspace.root / ".stillroom/recorders").iterdir()
        as_killed = document.read_bytes()
    document.write_bytes(as_killed)

    # A bound, which has a margin so that it changes rarely.
    assert 2 <= recorders_usd(workspace) <= 3
    # It counts in later recorders too, whether or not it was counted before they start.
    for is_counted in (False, True):
        if not is_counted:
            document.write_bytes(as_killed)
        with limited_recording(workspace, folder, 3.5, is_local=False) as (_, budget):
            assert budget is not None
            with pytest.raises(RefusedError, match="does not cover this call"):
                anyio.run(budget.reserve, body)
        assert 2 <= recorders_usd(workspace) <= 3


def test_a_damaged_document_starts_nothing(workspace: Workspace) -> None:
    write_cost(workspace, RecorderCost(folder="traces", spent_usd=3.0))
    [document] = (workspace.root / ".stillroom/recorders").iterdir()
    document.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="is damaged"):
        limit_budget(workspace, None)


def test_calls_of_models_without_a_price_cost_nothing_known(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(workspace.root / "traces", 3)
    (workspace.root / "prices.yml").write_text("", encoding="utf-8")
    models = list[str]()

    def read_price(place: Workspace, model: str) -> Price | None:
        models.append(model)
        return price_for(place, model)

    monkeypatch.setattr(recorders, "price_for", read_price)
    calls = budget_of_calls(workspace, workspace.root / "traces")
    assert (calls.budget.spent.usd, calls.num_unpriced) == (0, 3)
    # Each look-up reads prices.yml, to which the user may add a price at any time.
    assert models == ["m"]
    (workspace.root / "prices.yml").write_text(PRICES, encoding="utf-8")
    body = json.dumps({"model": "m", "messages": [], "max_tokens": 2}).encode()
    assert anyio.run(calls.reserve, body).max_cost.usd == 2


def test_counting_what_a_killed_recorder_has_cost_loads_no_aiohttp(
    workspace: Workspace,
) -> None:
    record(workspace.root / "traces", 2)
    write_cost(workspace, RecorderCost(folder="traces", budget_usd=15.0))
    script = (
        "import sys\n"
        "from stillroom.api.recorders import recorders_usd\n"
        "from stillroom.settings import open_workspace\n"
        "print(recorders_usd(open_workspace()), 'aiohttp' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True,
        cwd=workspace.root,
    )  # fmt: skip
    assert finished.stdout.strip() == "4.0 False"


def test_calls_that_had_ended_do_not_count_as_in_flight_when_an_idle_recorder_is_killed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_IDLE_S", 0)
    folder = workspace.root / "traces"
    reply = json_reply(json.dumps(REPLY).encode())
    with (
        limited_recording(workspace, folder, 15.0, is_local=False) as (journal, budget),
        RawEndpoint(lambda _: reply) as endpoint,
    ):
        service = RecordingProxy(
            journal, parse_upstreams([endpoint.url]), Admission(), budget=budget
        )
        [document] = (workspace.root / ".stillroom/recorders").iterdir()
        with in_thread(service) as url:
            assert request(url, "POST", CHAT, PAID_CALL).status == 200
            wait_until(lambda: not read_json(document, RecorderCost).in_flight_usd)
            as_killed = document.read_bytes()
    document.write_bytes(as_killed)
    assert recorders_usd(workspace) == 2


def test_a_call_that_is_written_after_the_recorder_was_stopped_costs_what_it_cost(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = list[RecordingProxy]()

    def write_late(handle: int) -> None:
        wait_until(lambda: services[0].is_cancelling)
        # Long enough for a recorder to end that does not wait.
        time.sleep(0.3)
        os.fsync(handle)

    monkeypatch.setattr(journals, "_sync", write_late)
    folder = workspace.root / "traces"
    event = b"data: " + json.dumps(REPLY).encode() + b"\n\n"
    waiting = [step for _ in range(400) for step in (chunk(b": waiting\n\n"), 0.01)]
    with (
        RawEndpoint(lambda _: [STREAM_HEAD + chunk(event), *waiting]) as endpoint,
        limited_recording(workspace, folder, 15.0, is_local=False) as (journal, budget),
    ):
        services.append(
            RecordingProxy(journal, parse_upstreams([endpoint.url]), Admission(), budget=budget)
        )
        with in_thread(services[0]) as url, RawClient(url) as client:
            client.send("POST", CHAT, PAID_CALL)
            assert client.read_head()
    [document] = (workspace.root / ".stillroom/recorders").iterdir()
    paid = budget_of_calls(workspace, folder).budget.spent.usd
    assert 0 < paid < 8
    assert read_json(document, RecorderCost).spent_usd == paid
