"""Every command, flag and configuration that README, docs and skills show is one that there is."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.documents import blocks_of, text_outside_blocks
from fakes.source_tree import ROOT
from manual.calls import command_line
from stillroom.api import operation_named
from stillroom.train.config.schema import CONFIGS
from stillroom_mcp.cli import build_parser

DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "skills").rglob("*.md"),
    ]
)
_COMMAND = re.compile(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*(stillroom [a-z](?:\\\n|[^\n])*)", re.MULTILINE)
_INLINE = re.compile(r"`(stillroom [a-z][^`\n]*)`")


def shown_in_blocks(document: Path) -> list[str]:
    return [
        command.replace("\\\n", " ")
        for block in blocks_of(document)
        if block.language in ("sh", "bash")
        for command in _COMMAND.findall(block.text)
    ]


def shown_inline(document: Path) -> list[str]:
    return _INLINE.findall(text_outside_blocks(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_in_blocks_are_understood(document: Path):
    for command in shown_in_blocks(document):
        arguments = shlex.split(command, comments=True)[1:]
        arguments = arguments[: arguments.index("&")] if "&" in arguments else arguments
        if "--help" not in arguments:
            build_parser(arguments)[0].parse_args(arguments)  # exits if it does not understand


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_in_sentences_have_these_names_and_flags(document: Path):
    for command in shown_inline(document):
        name, *words = command.removeprefix("stillroom ").split()
        parsers = build_parser([name])[1]
        assert name in parsers, command
        known = set(parsers[name]._option_string_actions)
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert flags <= known, command


def test_the_documents_show_commands():
    assert sum(len(shown_in_blocks(document)) for document in DOCUMENTS) > 30
    assert sum(len(shown_inline(document)) for document in DOCUMENTS) > 60


def tool_calls() -> list[tuple[str, str]]:
    return [
        (block.info.partition(" as=")[0], block.text)
        for document in DOCUMENTS
        for block in blocks_of(document)
        if block.language == "json" and block.info
    ]


def test_the_site_shows_commands_that_ask_for_the_same_as_the_tool_calls():
    calls = tool_calls()
    assert len(calls) > 80
    for name, text in calls:
        request, arguments = operation_named(name).request, json.loads(text)
        command = command_line(operation_named(name), arguments)
        words = shlex.split(command.replace("\\\n", " "))[1:]
        parsed = vars(build_parser(words)[0].parse_args(words))
        fields = {key: value for key, value in parsed.items() if key in request.model_fields}
        # A shell cannot tell a number from its text, nor one input from a list of one.
        typed = {
            key: fields[key]
            for key, value in arguments.items()
            if fields[key] in (str(value), [str(value)])
        }
        assert request.model_validate(fields) == request.model_validate(arguments | typed)


def configurations() -> Iterator[tuple[Path, dict[str, Any]]]:
    for document in DOCUMENTS:
        for block in blocks_of(document):
            if block.language == "yaml" and re.search("^dataset_type:", block.text, re.MULTILINE):
                yield document, yaml.safe_load(block.text)


def test_configurations_have_known_keys():
    shown = list(configurations())
    assert len({document for document, _ in shown}) > 3
    for _, config in shown:
        CONFIGS[config["dataset_type"]].model_validate(config)
