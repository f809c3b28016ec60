import pytest

from stillroom.importing.formats.datasets.feedback_tables import is_thumb


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("thumb", True),
        ("thumbs_up", True),
        ("userVote", True),
        ("user_feedback", True),
        ("thumbs_down", False),
        ("thumbsDown", False),
        ("no_vote", False),
        ("hallucination_score", False),
        ("value", False),
    ],
)
def test_a_thumb_is_a_score_of_which_1_is_good(name: str, is_one: bool) -> None:
    assert is_thumb(name) == is_one
