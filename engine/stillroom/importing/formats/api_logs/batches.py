"""Joins the request and result files of OpenAI's and Anthropic's batches.

A result refers to its request by `custom_id`, which is unique only within its batch. So each file
of results is joined with the one file of requests that has most of its ids.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.importing.json_rows import (
    Row,
    UnreadableRowError,
    listed_rows,
    read_json_rows,
    source_folder,
)
from stillroom.importing.payloads.calls import NO_REQUEST, logged_calls, read_calls
from stillroom.importing.payloads.fields import as_row, text_of, without_empty
from stillroom.importing.records import (
    Location,
    LoggedConversation,
    RefusedRow,
    SourceRow,
    TraceFormat,
)
from stillroom.importing.spill import DiskDict
from stillroom.importing.table_rows import detect_by_item

_Key = tuple[int, str]
"""The number of a file, and a custom_id in it."""


@dataclass(frozen=True, slots=True)
class _BatchApi:
    """The provider of an API, and the functions that read the rows of its batches."""

    provider: str
    is_request: Callable[[Row], bool]
    is_result: Callable[[Row], bool]
    request: Callable[[Row], Any]
    response: Callable[[Row], Any]
    """Returns the response's body, or an object with an `error`."""


@dataclass(slots=True)
class _Requests:
    """The requests in all files, and the ids of the results."""

    bodies: DiskDict[_Key]
    locations: dict[_Key, Location] = field(default_factory=dict[_Key, Location])
    result_ids: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """For each file, by its number: the custom_ids of its results."""


def _read(paths: Sequence[Path], api: _BatchApi) -> Iterator[SourceRow]:
    """Yields the calls of all batches, and the rows that are not part of a call."""
    with DiskDict[_Key]() as bodies:
        requests = _Requests(bodies)
        yield from _read_requests(paths, api, requests)
        answered: set[_Key] = set()
        for number, path in enumerate(paths):
            if number in requests.result_ids:
                yield from _join_results(number, path, api, requests, answered, paths)
        for key, location in requests.locations.items():
            if key not in answered:
                detail = f"no input file has a result for {key[1]!r}"
                yield RefusedRow(location, "no result for this request", detail)


def _read_requests(
    paths: Sequence[Path], api: _BatchApi, requests: _Requests
) -> Iterator[RefusedRow]:
    """Stores the requests of all files; yields the rows that are neither request nor result."""
    for number, path in enumerate(paths):
        for row in read_json_rows(path):
            if isinstance(row, RefusedRow):
                yield row
                continue
            # The body of an API call lists its requests.
            for listed in listed_rows(row, "requests", part="request"):
                item, location = listed.data, listed.location
                custom_id = text_of(item.get("custom_id"))
                if custom_id is not None and api.is_result(item):
                    requests.result_ids.setdefault(number, set()).add(custom_id)
                elif custom_id is None or not api.is_request(item):
                    yield RefusedRow(location, "neither a request nor a result of a batch")
                elif requests.bodies.add((number, custom_id), api.request(item)):
                    requests.locations[number, custom_id] = location
                else:
                    detail = f"{custom_id!r} appears twice in this file"
                    yield RefusedRow(location, "a custom_id that is not unique", detail)


def _join_results(
    number: int,
    path: Path,
    api: _BatchApi,
    requests: _Requests,
    answered: set[_Key],
    paths: Sequence[Path],
) -> Iterator[SourceRow]:
    """Yields the call of each result in a file; `answered` gets the requests that have a result."""
    try:
        source = _requests_file_of(number, requests, paths)
        problem = None
    except UnreadableRowError as error:
        source, problem = None, error
    for row in read_json_rows(path):
        if isinstance(row, RefusedRow):
            continue  # it was yielded when the requests were read
        custom_id = text_of(row.data.get("custom_id"))
        if custom_id is None or not api.is_result(row.data):
            continue
        try:
            if problem is not None:
                raise problem
            key = (source if source is not None else -1, custom_id)
            calls = list(_calls(row.location, row.data, key, api, requests, answered))
        except UnreadableRowError as error:
            yield RefusedRow(row.location, error.reason, error.detail)
            if (
                source is not None
                and (key := (source, custom_id)) in requests.locations
                and (key not in answered)
            ):
                answered.add(key)
                yield RefusedRow(requests.locations[key], error.reason, f"see {row.location}")
        else:
            yield from calls


def _requests_file_of(number: int, requests: _Requests, paths: Sequence[Path]) -> int | None:
    """Returns the number of the file that has the requests of a file's results, or None.

    Raises UnreadableRowError if several files match equally well.
    """
    ids = requests.result_ids[number]
    num_ids = Counter(file for file, custom_id in requests.locations if custom_id in ids)
    if not num_ids:
        return None
    most = max(num_ids.values())
    candidates = [file for file, count in num_ids.items() if count == most]
    folder = source_folder(paths[number])
    same_folder = [file for file in candidates if source_folder(paths[file]) == folder]
    candidates = same_folder if len(same_folder) == 1 else candidates
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(paths[file].name for file in candidates)
    detail = f"{names} have the same custom_ids: import each batch separately"
    raise UnreadableRowError("several request files have this custom_id", detail)


def _calls(
    location: Location,
    result: Row,
    key: _Key,
    api: _BatchApi,
    requests: _Requests,
    answered: set[_Key],
) -> Iterator[LoggedConversation]:
    """Yields the calls of a result, joined with its request."""
    body = requests.bodies.get(key)
    if body is None:
        detail = f"no input file has the request {key[1]!r}"
        raise UnreadableRowError(NO_REQUEST, detail)
    if key in answered:
        raise UnreadableRowError("a second result of the same request", repr(key[1]))
    calls = read_calls(body, api.response(result))
    answered.add(key)
    yield from logged_calls(
        location,
        calls,
        metadata=without_empty(custom_id=key[1]),
        provider=api.provider,
        merged_from=(requests.locations[key],),
    )


def _openai_response(row: Row) -> Any:
    """Returns the response's body in a row of OpenAI's results, or an object with an `error`."""
    if row.get("error"):
        return {"error": row["error"]}
    response = as_row(row.get("response"))
    body, status = response.get("body"), response.get("status_code")
    if isinstance(status, int) and status >= 400 and not as_row(body).get("error"):
        return {"error": f"status {status}"}
    return body


def _anthropic_response(row: Row) -> Any:
    """Returns the message in a row of Anthropic's results, or an object with an `error`."""
    result = as_row(row["result"])
    if result.get("type") == "succeeded":
        return result.get("message")
    error = as_row(result.get("error"))
    return {"error": error.get("error") or error or result.get("type") or "no result"}


_OPENAI = _BatchApi(
    provider="openai",
    is_request=lambda row: isinstance(row.get("body"), dict) and "url" in row,
    is_result=lambda row: "response" in row or "error" in row,
    request=lambda row: row["body"],
    response=_openai_response,
)
_ANTHROPIC = _BatchApi(
    provider="anthropic",
    is_request=lambda row: isinstance(row.get("params"), dict),
    is_result=lambda row: isinstance(row.get("result"), dict),
    request=lambda row: row["params"],
    response=_anthropic_response,
)


def _detector_of(api: _BatchApi) -> Callable[[Path, bytes], bool]:
    return detect_by_item(
        lambda row: "custom_id" in row and (api.is_request(row) or api.is_result(row)), "requests"
    )


OPENAI_BATCH = TraceFormat(
    name="openai_batch",
    title="OpenAI batches: files of requests and of results",
    is_recognised=_detector_of(_OPENAI),
    read=lambda paths: _read(paths, _OPENAI),
)
ANTHROPIC_BATCH = TraceFormat(
    name="anthropic_batch",
    title="Anthropic message batches: requests and results",
    is_recognised=_detector_of(_ANTHROPIC),
    read=lambda paths: _read(paths, _ANTHROPIC),
)
