"""What stores, registries and hosts read about the package agrees with the package."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.source_tree import ROOT
from package.bundle import manifest, write_bundle
from stillroom import __version__
from stillroom.api import OPERATIONS


def document(name: str) -> dict[str, Any]:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def test_every_manifest_names_the_same_version():
    plugin, server = document(".claude-plugin/plugin.json"), document("server.json")
    versions = [plugin["version"], server["version"], manifest()["version"]]
    versions += [package["version"] for package in server["packages"]]
    assert set(versions) == {__version__}
    assert f"## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_changelog_gives_the_days_of_its_changes_the_newest_first():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    days = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in days)
    assert days == sorted(set(days), reverse=True)
    assert text.index("- ") > text.index("### ")


def test_the_registry_finds_its_name_in_the_readme_and_accepts_the_lengths():
    server = document("server.json")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- mcp-name: {server['name']} -->" in readme
    assert re.fullmatch(r"[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+", server["name"])
    assert len(server["description"]) <= 100
    assert len(server["title"]) <= 100


def test_the_marketplace_offers_the_plugin_whose_paths_are_there():
    marketplace, plugin = (document(f".claude-plugin/{n}.json") for n in ("marketplace", "plugin"))
    assert [entry["name"] for entry in marketplace["plugins"]] == [plugin["name"]]
    assert (ROOT / plugin["skills"]).is_dir()
    server = document(plugin["mcpServers"])["mcpServers"]["stillroom"]
    script = ROOT / server["command"].removeprefix("${CLAUDE_PLUGIN_ROOT}/")
    assert script.stat().st_mode & 0o111


def test_the_bundle_lists_the_tools_and_has_the_same_bytes_each_time(tmp_path: Path):
    first, second = (write_bundle(tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as bundle:
        listed = json.loads(bundle.read("manifest.json"))
        entry_point = listed["server"]["entry_point"]
        assert {"manifest.json", "pyproject.toml", entry_point} <= set(bundle.namelist())
        assert f"stillroom=={__version__}" in bundle.read("pyproject.toml").decode()
    assert [tool["name"] for tool in listed["tools"]] == [o.name for o in OPERATIONS]


@pytest.mark.parametrize("name", ["ci", "release"])
def test_workflows_run_what_is_here_and_hold_no_secret(name: str):
    text = (ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {c.split()[1] for c in commands if c.startswith("make ")}
    assert called
    assert called <= targets
    assert (ROOT / ".ci/run").exists()
    assert "secrets." not in text
    assert all("timeout-minutes" in job for job in jobs.values())


def test_a_release_is_published_by_trust_with_attestations():
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    publish = yaml.safe_load(text)["jobs"]["publish"]
    assert publish["permissions"]["id-token"] == "write"
    uploads = [s for s in publish["steps"] if "gh-action-pypi-publish" in s.get("uses", "")]
    assert uploads[0]["with"] == {"attestations": True}
    assert publish["needs"] == "build"
