"""The user's keys.yml, outside of the workspace."""

from pathlib import Path

import pytest


def allow_keys(monkeypatch: pytest.MonkeyPatch, folder: Path, *entries: str) -> Path:
    """Writes entries such as `{key: MY_KEY, host: gateway.test}` and returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "keys.yml"
    path.write_text("".join(f"- {entry}\n" for entry in entries), encoding="utf-8")
    monkeypatch.setenv("STILLROOM_CONFIG", str(folder))
    return path
