"""A pack's attention by every kernel is that of one dense mask over the whole row.

The kernel of CUDA is a stand-in here (fakes/varlen.py); its arguments, and all around it, are what
runs on a GPU.
"""

import weakref

import pytest
import torch

from fakes.families import build_family
from fakes.varlen import varlen_attn
from stillroom.models import kernels
from stillroom.models.batches import TokenSequence
from stillroom.models.kernels import KernelChoice, Pack, PackSpan, attend, choose_kernel
from stillroom.models.lm_head import HeadRunner
from stillroom.models.probe import choose_passes

ALONE = [PackSpan(5), PackSpan(1), PackSpan(9)]
SHARED = [PackSpan(7), PackSpan(4, (0,)), PackSpan(6, (0, 1)), PackSpan(1, (0, 1)), PackSpan(3)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The kernel that torch has for CUDA is replaced by one that runs here."""
    monkeypatch.setattr(kernels, "_varlen_attention", lambda: varlen_attn)


def dense_mask(spans, window):
    """Returns which token of the row sees which, from what spans are said to be."""
    starts = torch.tensor([0, *(s.length for s in spans)]).cumsum(0).tolist()
    total = starts[-1]
    seen = torch.zeros(total, total, dtype=torch.bool)
    for index, span in enumerate(spans):
        context = [
            token for i in (*span.before, index) for token in range(starts[i], starts[i + 1])
        ]
        for token in range(starts[index], starts[index + 1]):
            before = context[: context.index(token) + 1]
            seen[token, before[-window:] if window else before] = True
    return seen


def heads(total, dtype, *, of_queries=4, of_keys=2, size=8):
    draw = torch.Generator().manual_seed(0)
    counts = (of_queries, of_keys, of_keys)
    return [
        torch.randn(1, count, total, size, generator=draw).to(dtype).requires_grad_()
        for count in counts
    ]


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("spans", torch.float32), ("varlen", torch.float16), ("varlen", torch.bfloat16)],
)
@pytest.mark.parametrize("window", [None, 2, 3, 8, 50])
@pytest.mark.parametrize("spans", [ALONE, SHARED], ids=["alone", "shared"])
def test_attention_and_its_gradient_are_those_of_a_dense_mask(kernel, dtype, window, spans):
    pack = Pack(spans, kernel)
    inputs = heads(sum(pack.lengths), dtype)

    found = attend(pack, *inputs, window=window, scale=0.3)

    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *exact, attn_mask=dense_mask(spans, window), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((found * weights.to(dtype)).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    assert found.dtype == dtype
    for ours, reference in zip([found, *gradients], [expected, *wanted], strict=True):
        gap = (ours.float() - reference).abs().max() / reference.abs().max()
        assert gap < TOLERANCE[dtype]


@pytest.mark.parametrize("spans", [ALONE, SHARED], ids=["alone", "shared"])
def test_copies_of_a_shared_prefix_are_not_kept_for_the_backward_pass(monkeypatch, spans):
    copies = []

    def attention(query, key, value, *args, **options):
        copies.extend(weakref.ref(tensor) for tensor in (key, value) if len(key) > len(query))
        return varlen_attn(query, key, value, *args, **options)

    monkeypatch.setattr(kernels, "_varlen_attention", lambda: attention)
    inputs = heads(sum(span.length for span in spans), torch.bfloat16)

    found = attend(Pack(spans, "varlen"), *inputs)

    assert len(copies) == (2 if spans is SHARED else 0)
    assert [copy for copy in copies if copy() is not None] == []
    found.float().sum().backward()
    assert len(copies) == (4 if spans is SHARED else 0)


def test_numbers_under_autocast_are_cast_as_torchs_own_attention_casts_them():
    query, key, value = heads(15, torch.float32)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(Pack(ALONE, "varlen"), query, key, value.bfloat16())

    assert found.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"does not support torch\.float32"):
        attend(Pack(ALONE, "varlen"), query, key, value)


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_and_an_apple_gpu_attend_span_by_span(device, dtype):
    assert choose_kernel(torch.device(device), dtype) == KernelChoice("spans")


def test_on_cuda_all_spans_run_at_once_if_torch_and_the_gpu_can(monkeypatch):
    def chosen(dtype=torch.bfloat16, capability=(9, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: capability)
        return choose_kernel(torch.device("cuda"), dtype)

    assert chosen() == chosen(torch.float16) == KernelChoice("varlen")
    assert chosen(torch.float32) == KernelChoice(
        None, "torch's variable-length attention needs bf16 or fp16"
    )
    assert "compute capability 8.0 or later" in chosen(capability=(7, 5)).reason
    monkeypatch.setattr(kernels, "_varlen_attention", lambda: None)
    assert "has no variable-length attention" in chosen().reason


def test_the_torch_that_is_installed_has_the_kernel_that_is_stood_in_for(monkeypatch):
    import inspect

    monkeypatch.undo()
    real = kernels._varlen_attention.__wrapped__()

    wanted = inspect.signature(varlen_attn).parameters
    assert real is not None
    assert (
        wanted.items()
        <= {
            name: parameter.replace(annotation=wanted[name].annotation)
            for name, parameter in inspect.signature(real).parameters.items()
            if name in wanted
        }.items()
    )


def sequences():
    draw = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(3, 120, (length,), generator=draw).tolist()

    start = ids(12)
    rows = [ids(33), ids(5), [*start, *ids(9)], [*start, *ids(30)]]
    return [TokenSequence(row, [True] * len(row)) for row in rows]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_model_packs_by_the_kernel_of_cuda_and_says_so(family):
    head = HeadRunner(build_family(family))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        padded = head.batch_logits(head.collate(sequences()))
    choose_passes(head, compute_dtype=torch.bfloat16, kernel="varlen")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = head.collate(sequences())
        packed = head.batch_logits(batch)

    assert head.can_pack
    assert batch.passes[0].pack.kernel == "varlen"
    assert len(batch.passes[0].pack.spans) == 5
    [note] = head.notes
    assert "packed without padding (flash attention)" in note
    assert (packed - padded).abs().max() < 8e-2 * padded.abs().max()


def broken(change):
    """Returns a kernel that computes something else than is meant."""

    def attention(*args, **options):
        return varlen_attn(*args, **{**options, **change(options)})

    return attention


@pytest.mark.parametrize(
    "attention",
    [
        broken(lambda _: {"window_size": (-1, -1)}),
        broken(lambda o: {"window_size": (o["window_size"][0] + 1, 0)}),
        broken(lambda _: {"window_size": (-1, 0)}),
        broken(lambda o: {"scale": 2 * (o["scale"] or 1.0)}),
        lambda *args, **options: varlen_attn(*args, **options).detach(),
    ],
    ids=["not causal", "a wider window", "no window", "another scale", "no gradient"],
)
def test_a_kernel_that_computes_something_else_is_found_out(monkeypatch, attention):
    monkeypatch.setattr(kernels, "_varlen_attention", lambda: attention)
    # The result for a copy is kept, and other tests have probed this one.
    head = HeadRunner(build_family("gemma3", initializer_range=0.31))

    choose_passes(head, compute_dtype=torch.bfloat16, kernel="varlen")

    assert head.rules.layout == "padded"
    assert "rows of Gemma3ForCausalLM are padded" in head.notes[0]


def test_weights_that_are_yet_to_be_sharded_are_probed_where_they_are(monkeypatch):
    calls = []

    def attention(query, *args, **options):
        calls.append(query.dtype)
        return varlen_attn(query, *args, **options)

    monkeypatch.setattr(kernels, "_varlen_attention", lambda: attention)
    # Another device to torch, on which a copy of the model can be run here all the same.
    other = torch.device("cpu", 0)
    head = HeadRunner(build_family("qwen3", initializer_range=0.32))

    choose_passes(head, device=other, compute_dtype=torch.bfloat16, kernel="varlen")

    assert (head.can_pack, head.rules.kernel) == (True, "varlen")
    # Forward and backward pass of the copy's two layers, and none of the model's own two.
    assert calls == [torch.bfloat16] * 4

    choose_passes(head, compute_dtype=torch.bfloat16, kernel="varlen")

    # The model's own sequences are too short to share a prefix, which is copied anew backwards.
    assert len(calls) == 4 + 4 + 2


def test_a_kernel_that_cannot_run_a_models_heads_leaves_it_to_padded_rows():
    # DeepSeek's keys are wider than its values.
    head = HeadRunner(build_family("deepseek-v3"))

    choose_passes(head, compute_dtype=torch.bfloat16, kernel="varlen")

    assert head.rules.layout == "padded"
    assert len(head.notes) == 1


def test_where_packs_would_be_slow_rows_are_padded_and_the_note_says_why(monkeypatch):
    head = HeadRunner(build_family("qwen3"))
    monkeypatch.setattr(
        "stillroom.models.probe.choose_kernel", lambda *_: KernelChoice(None, "no kernel here")
    )

    choose_passes(head)

    assert head.rules.layout == "padded"
    [note] = head.notes
    assert note.startswith("rows of Qwen3ForCausalLM are padded to the longest row of their pass")
    assert note.endswith(": no kernel here")
