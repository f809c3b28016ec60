from pathlib import Path

import pytest

from fakes.lineages import Lineages


@pytest.fixture
def project(tmp_path: Path) -> Lineages:
    lineages = Lineages(tmp_path)
    lineages.all()
    return lineages
