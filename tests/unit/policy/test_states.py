import torch

from stillroom.policy.slot_cache import ForwardPlan, StateLayer


def plan(slots, *, is_first=False, fillers=None):
    return ForwardPlan(
        slots_B=torch.tensor(slots),
        positions_Bn=torch.zeros(len(slots), 1, dtype=torch.int64),
        num_attended=1,
        is_prefix=slots == list(range(len(slots))),
        is_first=is_first,
        fillers_F=None if fillers is None else torch.tensor(fillers),
    )


def run(layer, given, states, *, in_place=False):
    """Runs a pass that sets the rows' states; returns the states that it found, or None."""
    layer.begin_pass(given)
    found = layer.recurrent_states[0] if layer.has_previous_state[0] else None
    found = None if found is None else found.clone()
    new = torch.tensor(states)[:, None]
    if in_place:
        layer.recurrent_states[0].copy_(new)
    else:
        layer.update_recurrent_state(new)
    layer.end_pass(given)
    return None if found is None else found[:, 0].tolist()


def test_rows_find_their_states_again_wherever_they_stand_in_a_pass():
    layer = StateLayer(4, 1)
    assert run(layer, plan([1, 3], is_first=True), [1.0, 3.0]) is None
    assert run(layer, plan([0, 2], is_first=True), [0.5, 2.0]) is None

    assert run(layer, plan([0, 1, 2, 3]), [10.0, 11.0, 12.0, 13.0]) == [0.5, 1.0, 2.0, 3.0]
    assert run(layer, plan([1, 3]), [21.0, 23.0], in_place=True) == [11.0, 13.0]
    assert run(layer, plan([0, 1]), [0.0, 0.0], in_place=True) == [10.0, 21.0]
    assert run(layer, plan([2, 3]), [0.0, 0.0]) == [12.0, 23.0]


def test_a_row_that_is_run_along_keeps_its_state():
    layer = StateLayer(3, 1)
    run(layer, plan([0, 1, 2], is_first=True), [1.0, 2.0, 3.0])

    run(layer, plan([0, 1, 2], fillers=[1]), [7.0, 8.0, 9.0], in_place=True)

    assert run(layer, plan([0, 1, 2]), [0.0, 0.0, 0.0]) == [7.0, 2.0, 9.0]
