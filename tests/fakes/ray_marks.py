"""What every test on a local Ray cluster is marked with."""

import pytest

RAY_MARKS = [
    pytest.mark.ray,
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('ray')"),
    # Ray's own: pipes of the processes that it started, and what it will do in a later version.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:ray"),
]
