import pytest

from stillroom.policy.graphs import rounded_attended, rounded_rows


@pytest.mark.parametrize(
    ("num_rows", "most", "rows"), [(1, 64, 1), (3, 64, 4), (33, 64, 64), (33, 48, 48), (48, 48, 48)]
)
def test_rows_are_rounded_to_few_sizes(num_rows, most, rows):
    assert rounded_rows(num_rows, limit=most) == rows


@pytest.mark.parametrize(
    ("num_attended", "most", "attended"),
    [
        (1, 4096, 256),
        (256, 4096, 256),
        (257, 4096, 512),
        (2049, 40960, 2560),
        (9000, 40960, 10240),
        (300, 400, 400),
        (100, 64, 100),
    ],
)
def test_attended_tokens_are_rounded_up_by_a_quarter_at_most(num_attended, most, attended):
    assert rounded_attended(num_attended, limit=most) == attended
