from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import strategies as st

from stillroom.errors import InputError, TeacherError
from stillroom.settings import Workspace
from stillroom.teachers.pricing import Price, price_for, price_list, refresh_prices, require_price


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def write_prices(workspace: Workspace, text: str) -> Path:
    path = workspace.root / "prices.yml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("model", "listed"),
    [
        ("gpt-5", "gpt-5"),
        ("openai/gpt-5", "gpt-5"),
        ("gpt-5-2025-08-07", "gpt-5"),
        ("openai/gpt-5-mini-2025-08-07", "gpt-5-mini"),
        ("claude-haiku-4-5-20251001", "claude-haiku-4-5"),
        ("anthropic/claude-sonnet-4.5", "claude-sonnet-4-5"),
        ("models/gemini-2.5-flash", "gemini-2.5-flash"),
        ("gemini-2.5-pro-latest", "gemini-2.5-pro"),
    ],
)
def test_a_listed_model_is_known_by_its_maker_and_date_too(
    workspace: Workspace, model: str, listed: str
) -> None:
    price = price_for(workspace, model)

    assert price is not None
    assert price == price_for(workspace, listed)


@pytest.mark.parametrize("model", ["gpt-4o-2024-05-13", "openai/gpt-4o-2024-05-13"])
def test_a_dated_model_with_a_price_of_its_own_has_it(workspace: Workspace, model: str) -> None:
    assert price_for(workspace, model) == Price(5, 15)
    assert price_for(workspace, "gpt-4o-2024-08-06") == Price(2.5, 10)


@pytest.mark.parametrize(
    "model", ["", "m", "gpt", "gpt-5-turbo", "my-gpt-5", "gpt-5/m", "openai/gpt-5:free", "gpt-5-1"]
)
def test_a_name_that_only_looks_like_a_listed_one_has_no_price(
    workspace: Workspace, model: str
) -> None:
    assert price_for(workspace, model) is None


def test_the_workspaces_own_prices_add_to_the_list_and_override_it(workspace: Workspace) -> None:
    write_prices(
        workspace,
        "my-model: {input: 0.15, output: 0.60}\n"
        "gpt-5: {input: 1, output: 2}\n"
        '"own/free:v1": {input: 0, output: "0"}\n'
        "7: {input: 7, output: 7, note: a name may be a number}\n",
    )

    assert price_for(workspace, "my-model") == Price(0.15, 0.6)
    assert price_for(workspace, "gpt-5") == Price(1, 2)
    assert price_for(workspace, "own/free:v1") == Price(0, 0)
    assert price_for(workspace, "7") == Price(7, 7)
    assert price_for(workspace, "gpt-4o") == Price(2.5, 10)
    # One's own names are meant as they are written.
    assert price_for(workspace, "maker/my-model") is None


@pytest.mark.parametrize("text", ["", "\n", "# no prices yet\n", "{}"])
def test_an_empty_price_file_changes_nothing(workspace: Workspace, text: str) -> None:
    write_prices(workspace, text)

    assert price_for(workspace, "gpt-4o") == Price(2.5, 10)
    assert price_for(workspace, "m") is None


@pytest.mark.parametrize(
    "text",
    [
        "my-model: {input: 0.15",
        "- my-model",
        "my-model",
        "my-model: 0.15",
        "my-model:",
        "my-model: [1, 2]",
        "my-model: {input: 0.15}",
        "my-model: {prompt: 0.15, completion: 0.6}",
        "my-model: {input: cheap, output: 0.6}",
        "my-model: {input: -1, output: 0.6}",
        "my-model: {input: .nan, output: 0.6}",
        "my-model: {input: 1, output: [0.6]}",
        "my-model: {input: 1, output: }",
        "other: {input: 1, output: 1}\nmy-model: {}",
        "\tmy-model: {}",
        "\x00my-model",
    ],
)
def test_a_broken_price_file_is_an_error_that_names_it_and_shows_a_line(
    workspace: Workspace, text: str
) -> None:
    path = write_prices(workspace, text)
    if "\x00" in text:
        path.write_bytes(b"\xff\xfe" + text.encode())

    with pytest.raises(InputError) as caught:
        price_for(workspace, "gpt-4o")
    assert str(path) in caught.value.problem
    assert '"my-model": {input: 0.15, output: 0.60}' in caught.value.fix


def test_a_price_that_is_needed_and_unknown_is_told_with_the_line_to_write(
    workspace: Workspace,
) -> None:
    with pytest.raises(InputError) as caught:
        require_price(workspace, "maker/new")
    assert "'maker/new'" in caught.value.problem
    assert f"the list of {price_list(workspace).as_of}" in caught.value.problem
    assert "stillroom prices --refresh" in caught.value.fix
    assert str(workspace.root / "prices.yml") in caught.value.fix
    line = caught.value.fix.partition("tokens: ")[2]

    write_prices(workspace, line)
    assert require_price(workspace, "maker/new") == Price(0.15, 0.6)
    assert require_price(workspace, "gpt-4o") == Price(2.5, 10)


LISTED = {
    "data": [
        {"id": "anthropic/claude-sonnet-9.5",
         "pricing": {"prompt": "0.000002", "completion": "0.00001"}},
        {"id": "qwen/qwen9-32b", "pricing": {"prompt": "0", "completion": "0.0000005"}},
        {"id": "openrouter/auto", "pricing": {"prompt": "-1", "completion": "-1"}},
        {"id": "bad\nname", "pricing": {"prompt": "1", "completion": "1"}},
        {"id": "maker/none"},
    ]
}  # fmt: skip


def listing(data: bytes, status: int = 200) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _request: httpx.Response(status, content=data))


def test_a_refreshed_list_is_dated_and_prices_yml_wins_over_it(workspace: Workspace) -> None:
    shipped = price_list(workspace)
    data = msgspec.json.encode(LISTED)

    written = refresh_prices(workspace, transport=listing(data))

    assert (written.path.name, written.num_unpriced) == ("list_prices.yml", 3)
    assert price_list(workspace).as_of >= shipped.as_of
    for name in ("claude-sonnet-9-5", "anthropic/claude-sonnet-9.5", "claude-sonnet-9-5-20270101"):
        assert price_for(workspace, name) == Price(2, 10)
    assert price_for(workspace, "qwen/qwen9-32b") == Price(0, 0.5)
    assert price_for(workspace, "openrouter/auto") is None
    write_prices(workspace, "claude-sonnet-9-5: {input: 7, output: 8}\n")
    assert price_for(workspace, "claude-sonnet-9-5") == Price(7, 8)


def test_a_list_older_than_the_shipped_one_is_not_used(workspace: Workspace) -> None:
    text = "as_of: 2020-01-01\nmodels:\n  gpt-4o: {input: 0, output: 0}\n"
    (workspace.root / "list_prices.yml").write_text(text, encoding="utf-8")

    assert price_for(workspace, "gpt-4o") == Price(2.5, 10)


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"{}", 200), (b"<html>", 200), (b'{"data": []}', 200), (b"[" * 100_000, 200), (b"", 503)],
)
def test_a_list_that_cannot_be_read_changes_nothing(
    workspace: Workspace, data: bytes, status: int
) -> None:
    with pytest.raises(TeacherError):
        refresh_prices(workspace, transport=listing(data, status))

    assert not (workspace.root / "list_prices.yml").exists()


PRICES, COUNTS = st.floats(0, 1000), st.integers(0, 1 << 40)
