"""The page of some rows."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.conversations import LAMP, PRICE, answer, calls, reply, user
from fakes.mask_families import MASK_FAMILIES, mask_tokenizer
from fakes.rollout_rows import write_lines, write_rows
from stillroom import api
from stillroom.data.chat.views import MAX_TOKENS_SHOWN
from stillroom.data.inspect import InspectExamples, inspect_examples
from stillroom.errors import InputError
from stillroom.report.data_pages import write_rows_page
from stillroom.settings import Workspace

ATTACK = "<script>alert(1)</script>"
TALK = [user(f"Price? {ATTACK}"), calls(LAMP), reply("12"), answer("It costs 12.")]


def page_of(folder: Path, *, tokenizer: Any = None, **options: Any) -> str:
    request = InspectExamples(path="rows.jsonl", n=5, **options)
    found = inspect_examples(Workspace(folder), request, tokenizer=tokenizer)
    write_rows_page(folder / "page.html", found, request)
    return (folder / "page.html").read_text(encoding="utf-8")


def test_every_token_is_there_with_its_id_and_the_trained_ones_are_marked(tmp_path: Path) -> None:
    tokenizer = mask_tokenizer(MASK_FAMILIES["chatml"])
    write_rows(tmp_path / "rows.jsonl", [{"messages": TALK, "tools": [PRICE]}])

    page = page_of(tmp_path, tokenizer=tokenizer, model="student", html="page.html")

    spans = re.findall(r'<span class="(\w+)( trained)?" title="([\d, ]+)">([^<]*)</span>', page)
    ids = [int(one) for _, _, found, _ in spans for one in found.split(", ")]
    text = tokenizer.decode(ids)
    assert ATTACK in text
    shown = "".join(html.unescape(said) for *_, said in spans).replace("↵", "")
    assert shown == text
    trained = [html.unescape(said) for role, mark, _, said in spans if mark]
    assert "".join(trained).endswith("It costs 12.<|im_end|>")
    assert "Price" not in "".join(trained)
    assert ATTACK not in page


def test_a_row_of_many_tokens_is_cut_and_says_so(tmp_path: Path) -> None:
    tokenizer = mask_tokenizer(MASK_FAMILIES["chatml"])
    write_rows(tmp_path / "rows.jsonl", [{"messages": [user("x 1 " * 7000), answer("y")]}])

    page = page_of(tmp_path, tokenizer=tokenizer, model="student", html="page.html")

    assert page.count('<span class="user" title=') <= MAX_TOKENS_SHOWN
    assert re.search("[1-9][0-9]* *[0-9]*.more tokens", page)


def test_without_a_model_it_shows_conversations_and_broken_rows_as_they_are(tmp_path: Path) -> None:
    pair = {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("c")]}
    long = {"messages": [user("x" * 5000), {"role": "assistant", "content": "y", "name": 5}]}
    lines = [json.dumps(row).encode() for row in ({"messages": TALK, "reward": 0.5}, pair, long)]
    write_lines(tmp_path / "rows.jsonl", [*lines, b"{" + ATTACK.encode()])

    page = page_of(tmp_path)

    assert "reward 0.5" in page
    assert all(f"<h3>{side}</h3>" in page for side in ("prompt", "chosen", "rejected"))
    assert "3 500 more characters" in page.replace("\N{NO-BREAK SPACE}", " ")
    assert page.count("x" * 3500) == 1
    assert "is not valid JSON" in page
    assert ATTACK not in page


def test_the_operation_writes_the_page_inside_the_workspace_only(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"messages": TALK}])
    workspace = Workspace(tmp_path)

    done = api.inspect_examples(workspace, InspectExamples(path="rows.jsonl", html="a/p.html"))

    assert done.html == "a/p.html"
    assert (tmp_path / "a/p.html").is_file()
    with pytest.raises(InputError, match="outside the workspace"):
        api.inspect_examples(workspace, InspectExamples(path="rows.jsonl", html="../p.html"))
    with pytest.raises(ValidationError, match="html"):
        InspectExamples(path="rows.jsonl", html="rows.jsonl")
