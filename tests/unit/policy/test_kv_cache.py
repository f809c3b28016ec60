import torch

from stillroom.policy.slot_cache import ForwardPlan, SlotCache, SlotLayer

HEADS, SIZE = 2, 3


def plan(slots, starts, *, num_new, num_attended):
    return ForwardPlan(
        slots_B=torch.tensor(slots),
        positions_Bn=torch.tensor(starts)[:, None] + torch.arange(num_new),
        num_attended=num_attended,
        is_prefix=slots == list(range(len(slots))),
    )


def states(rows, num_new, first=0.0):
    """Keys that all differ: [rows, HEADS, num_new, SIZE]."""
    count = rows * HEADS * num_new * SIZE
    return first + torch.arange(count, dtype=torch.float32).view(rows, HEADS, num_new, SIZE)


def test_a_slot_that_is_full_is_copied_too():
    cache = SlotCache([SlotLayer(2)])
    cache.begin_pass(plan([0, 1], [0, 0], num_new=128, num_attended=128))
    written = states(2, 128)
    cache.update(written, -written, 0)
    assert cache.capacity == 128

    cache.copy_tokens(0, [1], 128)

    cache.begin_pass(plan([1], [127], num_new=1, num_attended=128))
    keys, _ = cache.update(written[:1, :, 127:], -written[:1, :, 127:], 0)
    assert torch.equal(keys[0], written[0])
