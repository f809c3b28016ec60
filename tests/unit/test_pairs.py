"""The jobs that are done with Stillroom and with a script: texts, teacher, script and judge."""

import csv
import importlib
import json
import re
import sys
from itertools import combinations

import anyio
import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer

from fakes.source_tree import ROOT
from stillroom.importing.request import ImportRollouts
from stillroom.importing.run import import_rollouts
from stillroom.settings import Workspace

MODULES = ("worlds", "teacher", "logs", "script", "script_logs", "judge", "smollm2")
WORLDS = ("tickets", "reviews", "bank")
SHARED_WORDS = 4
WORDED_BY = {
    "plain": ("plain",),
    "unseen": ("unseen",),
    "judge": ("situations", "requests"),
    "teacher": ("teacher_situations", "teacher_requests"),
}


@pytest.fixture
def pairs(monkeypatch):
    """Loads a module of benchmarks/pairs."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "pairs"), *sys.path])
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(params=WORLDS)
def world(request, pairs):
    return pairs("worlds").load_world(request.param)


@pytest.fixture
def tickets(pairs):
    """The teacher of tickets."""
    worlds = pairs("worlds")
    return pairs("teacher").Teacher(worlds.load_world("tickets"), 1, worlds.PRICES)


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def request_for(text, system="Sort it.", **options):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"model": "teacher", "messages": messages, **options}


def answered(teacher, body):
    """Returns the first reply that is no refusal."""
    while True:
        status, reply = teacher.reply(body)
        if status == 200:
            return reply


def content_of(reply):
    return reply["choices"][0]["message"]["content"]


def word_runs(phrases):
    """Returns all runs of words in phrases, without what is filled in."""
    texts = [re.findall(r"[\w']+", re.sub(r"\{\w+\}", "", phrase).lower()) for phrase in phrases]
    return {
        tuple(words[start : start + SHARED_WORDS])
        for words in texts
        for start in range(len(words) - SHARED_WORDS + 1)
    }


def test_a_world_has_enough_labels_and_forms(world):
    assert len(world.labels) >= 6
    assert sum(len(topic["plain"]) for topic in world.topics.values()) >= 20


def test_no_two_ways_of_wording_share_a_form(world):
    runs = {
        way: word_runs(
            phrase for topic in world.topics.values() for kind in kinds for phrase in topic[kind]
        )
        for way, kinds in WORDED_BY.items()
    }
    assert [(a, b) for a, b in combinations(runs, 2) if runs[a] & runs[b]] == []


def test_each_text_has_the_patterns_of_its_own_label_only(pairs, world):
    patterns = list(world.patterns())
    examples = [*pairs("worlds").job_texts(world, 1), *world.examples("teacher", 80, 1)]
    for example in examples:
        found = {label for pattern, label in patterns if pattern.search(example.text)}
        assert found == {example.label}, example.text


def test_a_job_shows_texts_without_labels_and_hides_others(pairs, tmp_path, world):
    worlds = pairs("worlds")
    job = worlds.write_job(tmp_path / "a", world.name, 3)

    with (job / "inputs.csv").open(encoding="utf-8", newline="") as file:
        inputs = list(csv.DictReader(file))
    with (job / "labelled.csv").open(encoding="utf-8", newline="") as file:
        labelled = list(csv.DictReader(file))
    hidden = {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (tmp_path / "a" / "hidden").glob("*.jsonl")
    }
    assert [*inputs[0]] == ["id", "text", "created"]
    assert [*labelled[0]] == ["text", "label"]
    assert [row["text"] for row in hidden.pop("inputs")] == [row["text"] for row in inputs]
    assert (len(inputs), len(labelled)) == (600, 160)
    assert {kind: len(rows) for kind, rows in hidden.items()} == worlds.NUM_HIDDEN
    everything = [*inputs, *labelled, *(row for rows in hidden.values() for row in rows)]
    assert len({row["text"] for row in everything}) == 600 + 160 + 160 + 80 + 80
    assert {row["label"] for rows in (labelled, *hidden.values()) for row in rows} == {
        *world.labels
    }
    assert sorted(path.name for path in job.iterdir()) == [
        "README.md", "inputs.csv", "job.json", "labelled.csv",
    ]  # fmt: skip


def test_a_job_is_the_same_for_the_same_seed(pairs, tmp_path):
    worlds = pairs("worlds")
    texts = {
        folder: (worlds.write_job(tmp_path / folder, "bank", seed) / "inputs.csv").read_bytes()
        for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    }
    assert texts["a"] == texts["b"] != texts["c"]


def test_a_teacher_errs_chats_refuses_and_costs_as_it_is_said(pairs, world):
    worlds = pairs("worlds")
    teacher = pairs("teacher").Teacher(world, 1, worlds.PRICES)
    label_in = pairs("script").label_in
    inputs = worlds.job_texts(world, 1).inputs

    rounds = [
        [content_of(answered(teacher, request_for(x.text, world.system))) for x in inputs]
        for _ in range(4)
    ]
    billed = teacher.billed()

    answers = [answer for answers in rounds for answer in answers]
    wrong = [
        [label_in(answer, world.labels) != x.label for answer in asked]
        for x, *asked in zip(inputs, *rounds, strict=True)
    ]
    assert sum(map(sum, wrong)) / len(answers) == pytest.approx(0.07, abs=0.02)
    assert sum(map(all, wrong)) / len(inputs) == pytest.approx(0.035, abs=0.02)
    assert sum(answer not in world.labels for answer in answers) / len(answers) == pytest.approx(
        0.2, abs=0.03
    )
    requests = billed["calls"] + billed["refused"]
    assert billed["calls"] == len(answers)
    assert billed["refused"] / requests == pytest.approx(0.08, abs=0.02)
    assert billed["dollars"] / 4 == pytest.approx(0.25, abs=0.03)


def test_a_teacher_answers_the_last_text_of_a_prompt_with_examples(pairs, tickets):
    first, last = pairs("worlds").job_texts(tickets.world, 1).inputs[:2]
    prompt = f"Ticket: {first.text}\nQueue: {first.label}\n\nTicket: {last.text}\nQueue:"
    assert tickets.find(prompt) == (last.text, last.label)


def test_a_teacher_knows_texts_that_it_has_reworded(tickets):
    source = "Hello, I want to send back order A1234."
    text = content_of(answered(tickets, request_for(source, "Paraphrase the message.")))
    assert text not in {source, *tickets.world.labels}
    assert tickets.find(f"Sort this:\n{text}")[1] == "returns"


def test_a_teacher_keeps_to_the_tokens_and_choices_that_are_asked_for(tickets):
    body = request_for("I was charged twice for order A1234.", max_tokens=1, n=3)
    reply = answered(tickets, body)
    assert all(len(choice["message"]["content"]) <= 4 for choice in reply["choices"])
    assert (len(reply["choices"]), reply["usage"]["completion_tokens"]) == (3, 3)
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}


def test_a_teacher_asks_for_the_text_if_there_is_none(tickets):
    assert content_of(answered(tickets, request_for("Hello!"))) == "Please show me the text."


def test_an_endpoint_says_what_it_has_billed(pairs, tickets):
    async def ask():
        app = pairs("teacher").application(tickets)
        async with TestClient(TestServer(app, host="127.0.0.1")) as client:
            body = request_for("I was charged twice for order A1234.")
            statuses, waits = [], []
            for _ in range(60):
                reply = await client.post("/v1/chat/completions", json=body)
                statuses.append(reply.status)
                waits += [reply.headers.get("Retry-After")] if reply.status == 429 else []
            return statuses, waits, await (await client.get("/billed")).json()

    statuses, waits, billed = anyio.run(ask)
    assert set(statuses) == {200, 429, 500}
    assert set(waits) == {"1"}
    assert billed["calls"] == statuses.count(200)
    assert billed["dollars"] > 0


@pytest.fixture
def asked(pairs, tickets):
    """Makes the script's client of the teacher of tickets."""

    def answer(request):
        status, reply = tickets.reply(json.loads(request.content))
        return httpx.Response(status, json=reply, headers={"Retry-After": "0"})

    def make(budget_usd):
        http = httpx.Client(
            base_url="http://teacher.test/v1", transport=httpx.MockTransport(answer)
        )
        return pairs("script").Teacher(http, "teacher", pairs("worlds").PRICES, budget_usd)

    return make


def test_the_script_stays_within_its_budget_and_knows_what_it_spent(pairs, tickets, asked):
    texts = [example.text for example in pairs("worlds").job_texts(tickets.world, 1).inputs[:80]]
    client = asked(0.02)
    answers = client.ask_all(tickets.world.system, texts, 16)

    assert None in answers
    assert sum(answer is not None for answer in answers) > 40
    assert client.spent == pytest.approx(tickets.billed()["dollars"], abs=1e-6)
    assert client.spent <= 0.02


def test_the_script_finds_the_label_of_a_chatty_answer(pairs):
    label_in, labels = pairs("script").label_in, ["billing", "delivery", "card_lost"]
    answers = {
        "billing": "billing",
        "This looks like **delivery** to me.": "delivery",
        "Category: card_lost.": "card_lost",
        'Billing\n\nThe customer says "no delivery", which is about that.': "billing",
        "No idea.": None,
    }
    assert {answer: label_in(answer, labels) for answer in answers} == answers


def test_the_script_takes_wrong_labels_out(pairs, tickets, asked):
    script, world = pairs("script"), tickets.world
    gold = {x.text: x.label for x in pairs("worlds").job_texts(world, 1).inputs[:300]}
    client = asked(1.0)
    answers = client.ask_all(world.system, list(gold), 16)
    rows = [(t, script.label_in(a, world.labels)) for t, a in zip(gold, answers, strict=True)]
    kept, num_doubtful = script.clean_rows(client, world.system, rows, world.labels)

    assert sum(gold[text] != label for text, label in rows) >= 12
    assert num_doubtful < 40
    assert len(kept) > 270
    assert sum(gold[text] != label for text, label in kept) <= 1


def test_a_judge_takes_nothing_but_the_label(pairs):
    class Echo:
        def answers(self, texts):
            return texts

    rows = [
        {"text": text, "label": "billing"} for text in ("billing", "Billing", "billing.", "sales")
    ]
    assert pairs("judge").judged(Echo(), rows) == {
        "accuracy": 0.25, "right": 1, "of": 4, "solved": "1000",
    }  # fmt: skip


def test_logs_are_read_alike_by_the_script_and_by_an_import(pairs, tmp_path):
    job = pairs("worlds").write_job(tmp_path, "tickets", 1)
    inputs = [json.loads(line) for line in lines_of(tmp_path / "hidden" / "inputs.jsonl")]
    right = {example["text"]: example["label"] for example in inputs}
    labels = json.loads((job / "job.json").read_text(encoding="utf-8"))["labels"]

    pairs("logs").write_logs(job, pairs("teacher").load_teacher(job))

    rows = pairs("script_logs").labelled_rows(job, labels)
    assert not (job / "inputs.csv").exists()
    assert 0.85 * len(right) < len(rows) < len(right)
    assert 0.93 < sum(right[text] == label for text, label in rows) / len(rows) < 1
    request = ImportRollouts(input="logs", output="rollouts.jsonl", reward_from=("thumb",))
    imported = import_rollouts(Workspace(job), request)
    failed = sum(
        '"error"' in line for path in (job / "logs").glob("*.jsonl") for line in lines_of(path)
    )
    assert imported.refused == failed
    disliked = sum("down" in line for line in lines_of(job / "logs" / "thumbs.csv"))
    rollouts = [json.loads(line) for line in lines_of(job / "rollouts.jsonl")]
    assert 0 < sum(one["success"] is False for one in rollouts) == disliked
    asked = {one["messages"][1]["content"] for one in rollouts if one["success"] is not False}
    assert asked >= {text for text, _ in rows}
