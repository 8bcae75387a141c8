"""winnow.compressor against the formula in torch, float64, and its autograd."""

import numpy as np
import pytest
import torch
import winnow.torch

import winnow

LENGTHS = (23, 0, 3, 8)


def problem(ratio=4, d=64, overlap=True, dtype=torch.float64, lengths=LENGTHS, pairs=8, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(of)

    columns, real = d * (1 + overlap), torch.promote_types(dtype, torch.float32)
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    rows = np.cumsum([0, *(length // ratio for length in lengths)]).astype(np.int32)
    angles = torch.arange(300)[:, None] * 0.5 ** torch.arange(pairs)
    return {
        "kv": normal(sum(lengths), columns),
        "gate": normal(sum(lengths), columns),
        "position_bias": normal(ratio, columns, of=real),
        "cu_seqlens": torch.from_numpy(ends),
        "cu_rows": torch.from_numpy(rows),
        "norm_weight": 1 + normal(d, of=real) / 4,
        "cos": angles.cos().to(real),
        "sin": angles.sin().to(real),
        "first_position": torch.tensor([7 * i for i in range(len(lengths))], dtype=torch.int32),
        "overlap": overlap,
    }


def windows(x, ratio, overlap, absent):
    """[tokens, columns] to [windows, slots, d], as DeepSeek's own code arranges them."""
    x = x[: len(x) // ratio * ratio].reshape(-1, ratio, x.shape[1])
    if not overlap:
        return x
    d = x.shape[2] // 2
    before = torch.cat([torch.full_like(x[:1, :, :d], absent), x[:-1, :, :d]])
    return torch.cat([before, x[:, :, d:]], dim=1)


def formula(kv, gate, position_bias, cu_seqlens, cu_rows, norm_weight, cos, sin, first_position,
            overlap, hadamard=False, eps=1e-6):  # fmt: skip
    ratio, result = len(position_bias), []
    ends = cu_seqlens.tolist()
    for begin, end, first in zip(ends, ends[1:], first_position.tolist(), strict=False):
        if end - begin < ratio:
            continue
        bias = position_bias.repeat((end - begin) // ratio + 1, 1)[: end - begin]
        weights = windows(gate[begin:end] + bias, ratio, overlap, -torch.inf).softmax(dim=1)
        rows = (weights * windows(kv[begin:end], ratio, overlap, 0)).sum(dim=1)
        rows = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight
        at = first + ratio * torch.arange(len(rows))
        width = 2 * cos.shape[1]
        plain, (a, b) = rows[:, :-width], rows[:, -width:].unflatten(1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * cos[at] - b * sin[at], a * sin[at] + b * cos[at]], dim=-1)
        rows = torch.cat([plain, turned.flatten(1)], dim=1)
        if hadamard:
            matrix = torch.ones(1, 1, dtype=rows.dtype)
            while len(matrix) < rows.shape[1]:
                matrix = torch.cat([torch.cat([matrix, matrix]), torch.cat([matrix, -matrix])], 1)
            rows = rows @ matrix / rows.shape[1] ** 0.5
        result.append(rows)
    return torch.cat(result)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (4, False), (3, True), (1, False)])
def test_rows_and_gradients(ratio, overlap, hadamard):
    given = problem(ratio, overlap=overlap)
    learned = [given[n].requires_grad_() for n in ("kv", "gate", "position_bias", "norm_weight")]
    want = formula(**given, hadamard=hadamard)
    d_rows = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(want, learned, d_rows)
    with torch.no_grad():
        given["hadamard"] = hadamard
        rows, rstd = winnow.compressor.forward(**given, num_rows=len(want), return_rstd=True)
        got = winnow.compressor.backward(**given, rows=rows, rstd=rstd, d_rows=d_rows)
    torch.testing.assert_close(rows, want.detach(), rtol=0, atol=1e-12)
    for ours, theirs in zip(got, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_one_sequence_of_the_models_sizes(dtype, error):
    """Rows of the compressed sparse attention and of the heavily compressed one; numpy agrees."""
    for ratio, overlap in ((4, True), (128, False)):
        given = problem(ratio, 512, overlap, dtype, lengths=(300,), pairs=32)
        wide = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t
                for n, t in given.items()}  # fmt: skip
        rows = winnow.compressor.forward(**given)
        assert rows.dtype == dtype and rows.shape == (300 // ratio, 512)
        torch.testing.assert_close(rows.double(), formula(**wide), rtol=error, atol=error)
        in_f32 = winnow.compressor.forward(**given, out=torch.empty(rows.shape))
        torch.testing.assert_close(in_f32.to(dtype), rows, rtol=0, atol=0)
        if dtype == torch.float32:
            arrays = {n: t.numpy() if torch.is_tensor(t) else t for n, t in given.items()}
            np.testing.assert_array_equal(winnow.compressor.forward(**arrays), rows.numpy())


@pytest.mark.parametrize("kind", ["CSA", "HCA"])
def test_rows_are_those_of_transformers(kind):
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    settings = modeling.DeepseekV4Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, q_lora_rank=32
    )
    module = getattr(modeling, f"DeepseekV4{kind}Compressor")(settings)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    if kind == "CSA":  # which chooses rows that this does not look at
        module.indexer.forward = lambda *_: torch.zeros(1, 300, 1, dtype=torch.long)
    x, positions, ratio = torch.randn(1, 300, 64), torch.arange(300)[None], module.compress_rate
    with torch.no_grad():
        want = module(x, None, positions, None, 0)[0][0, 0]
        cos, sin = module.rotary_emb(x, position_ids=positions, layer_type="compress")
        rows = winnow.compressor.forward(
            module.kv_proj(x)[0],
            module.gate_proj(x)[0],
            module.position_bias,
            torch.tensor([0, 300], dtype=torch.int32),
            torch.tensor([0, 300 // ratio], dtype=torch.int32),
            overlap=kind == "CSA",
            norm_weight=module.kv_norm.weight,
            eps=settings.rms_norm_eps,
            cos=cos[0].contiguous(),
            sin=sin[0].contiguous(),
        )
    torch.testing.assert_close(rows, want, rtol=0, atol=1e-6 * want.abs().max().item())


def test_without_what_is_optional():
    given = problem()
    names = ("kv", "gate", "position_bias", "cu_seqlens", "cu_rows", "overlap")
    plain = {name: given[name] for name in names}
    rows = winnow.compressor.forward(**plain, num_rows=7)
    d_kv, d_gate, d_bias = winnow.compressor.backward(
        **plain, rows=None, rstd=None, d_rows=torch.ones_like(rows)
    )
    # Weights add up to 1 in each column of each window, and so do gradients of kv.
    torch.testing.assert_close(d_kv.sum(), torch.tensor(7.0 * 64, dtype=torch.float64))
    torch.testing.assert_close(d_gate.sum(0), d_bias.sum(0), rtol=0, atol=1e-12)


def test_what_backward_gets():
    """rows and rstd into the caller's memory, either of them or both."""
    given = {**problem(dtype=torch.float32), "num_rows": 7}
    rows, rstd = winnow.compressor.forward(**given, return_rstd=True)
    x = winnow.compressor.forward(**{**given, "norm_weight": None, "cos": None, "sin": None})
    torch.testing.assert_close(rstd, (x.square().mean(1) + 1e-6).rsqrt())
    assert rstd.dtype == torch.float32 and torch.equal(winnow.compressor.forward(**given), rows)
    both = torch.zeros_like(rows), torch.zeros_like(rstd)
    for out in (both, (None, torch.zeros_like(rstd))):
        got = winnow.compressor.forward(**given, return_rstd=True, out=out)
        assert torch.equal(got[0], rows) and got[1] is out[1] and torch.equal(got[1], rstd)
        out[1].zero_()
        got = winnow.compressor.forward(**given, out=out)
        assert torch.equal(got, rows) and torch.equal(out[1], rstd)
    with pytest.raises(ValueError, match=r"rstd: want shape \[rows=7\], got \[8\]"):
        winnow.compressor.forward(**given, out=(None, torch.zeros(8)))


def caches(kind, d):
    """An empty cache of a kind as step() takes it, and what stores rows in one like it."""
    if kind == "pages":
        pages = torch.zeros(2, 64 * (d + 4), dtype=torch.uint8)
        return {"pages": pages}, lambda rows, slots, pages: winnow.indexer.quantize(
            rows, pages=pages, slots=slots
        )
    if kind == "bf16":
        cache = torch.zeros(2, 32, 1, d, dtype=torch.bfloat16)
    else:  # the blocks are padded
        blocks = torch.zeros(2, 33 * 576, dtype=torch.uint8)
        cache = blocks[:, : 32 * 584].unflatten(1, (32, 1, 584))
    return {"cache": cache}, lambda rows, slots, cache: winnow.sparse_mla.store(
        rows.bfloat16(), cache, slots, format=kind
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "d"), [("fp8_584", 512), ("bf16", 512), ("pages", 128)])
def test_steps_store_what_store_and_quantize_do(kind, d, dtype):
    given = problem(4, d, dtype=dtype, lengths=(45,), pairs=32)
    whole = winnow.compressor.forward(**{**given, "first_position": None}, hadamard=kind == "pages")
    fixed = {n: given[n] for n in ("position_bias", "norm_weight", "cos", "sin", "overlap")}
    fixed["hadamard"] = kind == "pages"
    want, store = caches(kind, d)
    places = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    store(whole, places[: len(whole)], *want.values())

    states = [torch.zeros(1, 11, 4 * d), torch.zeros(1, 11, 4 * d)]
    (alone, _), (beside, _) = caches(kind, d), caches(kind, d)
    zero, position = torch.zeros(1, dtype=torch.int32), 0
    for taken, undone in ((9, 0), (1, 0), (3, 2), (3, 3), (4, 1), (2, 0), (29, 0)):
        new = slice(position, position + taken)
        slots = places[(torch.arange(position, position + taken) // 4)]
        call = (
            given["kv"][new],
            given["gate"][new],
            given["position_bias"],
            torch.tensor([0, taken], dtype=torch.int32),
            torch.tensor([position], dtype=torch.int32),
        )
        options = {**fixed, "slots": slots}
        del options["position_bias"]
        assert winnow.compressor.step(*call, states[0], zero, **options, **alone) is None
        rows = torch.zeros(taken, d, dtype=dtype)
        winnow.compressor.step(*call, states[1], zero, **options, **beside, out=rows)
        ends = torch.arange(position + 1, position + taken + 1) % 4 == 0
        torch.testing.assert_close(
            rows[ends], whole[position // 4 : (position + taken) // 4], rtol=0, atol=0
        )
        position += taken - undone
    assert position == 45
    for stored in (alone, beside):
        for got, wanted in zip(stored.values(), want.values(), strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [False, True])
def test_the_operators(norm):
    lengths = 7, 0, 5
    given = problem(3, 16, pairs=3, lengths=lengths)
    tokens = ("cu_seqlens", "cu_rows")
    leaves = [given[n].requires_grad_() for n in ("kv", "gate", "position_bias", "norm_weight")]
    options = {n: given[n] for n in ("cos", "sin", "first_position", "overlap")}
    rows = sum(length // 3 for length in lengths)

    def call(kv, gate, bias, weight):
        return winnow.torch.compressor_forward(
            kv, gate, bias, *(given[n] for n in tokens), norm_weight=weight if norm else None,
            num_rows=rows, hadamard=True, **options,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, leaves)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for function in (call, compiled):
        got = torch.autograd.grad(function(*leaves).sum(), leaves[: 3 + norm])
        for gradient, leaf in zip(got, leaves, strict=False):
            assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
    arguments = [t.detach() for t in leaves[:3]] + [given[n] for n in tokens]
    options["norm_weight"] = leaves[3].detach() if norm else None
    torch.library.opcheck(
        torch.ops.winnow.compressor_forward.default, tuple(arguments), {**options, "num_rows": rows}
    )
    d_rows, made = torch.ones(rows, 16, dtype=torch.float64), (None, None)
    if norm:
        made = torch.ops.winnow.compressor_forward(*arguments, num_rows=rows, **options)
    torch.library.opcheck(
        torch.ops.winnow.compressor_backward.default, (*arguments, *made, d_rows), options
    )


def test_the_operator_of_steps():
    given = problem(lengths=(23,))
    state = torch.zeros(1, 8, 256, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.int32)
    names = ("kv", "gate", "position_bias", "cu_seqlens")
    arguments = (*(given[n] for n in names), zero, state, zero)
    torch.library.opcheck(torch.ops.winnow.compressor_step.default, arguments, {"overlap": True})
    rows = winnow.torch.compressor_step(*arguments, overlap=True)
    assert state.any() and rows[3::4].all() and not rows[4::4].any()


@pytest.mark.parametrize(("kind", "d"), [("bf16", 512), ("pages", 128)])
def test_the_operators_of_steps_that_store(kind, d):
    given = problem(4, d, dtype=torch.bfloat16, lengths=(23,))
    zero, state = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 8, 4 * d)
    slots = torch.arange(23, dtype=torch.int32) // 4
    names = ("kv", "gate", "position_bias", "cu_seqlens")
    ((where, cache),) = caches(kind, d)[0].items()
    arguments = (*(given[n] for n in names), zero, state, zero, cache, slots)
    name = "compressor_step_pages" if kind == "pages" else "compressor_step_store"
    operator = getattr(torch.ops.winnow, name).default
    torch.library.opcheck(operator, arguments, {"overlap": True})
    assert getattr(winnow.torch, name)(*arguments, overlap=True) is None
    want = torch.zeros_like(cache)
    winnow.compressor.step(
        *(given[n] for n in names), zero, state.clone(), zero, overlap=True, slots=slots,
        **{where: want},
    )  # fmt: skip
    assert state.any() and cache.any() and torch.equal(cache, want)


def test_refusals():
    given = problem()
    for number, got in ((None, 8), (6, 6), (34, 34)):  # None: 34 // 4
        text = f"forward: num_rows: want 7 rows, the last of cu_rows, got {got}$"
        with pytest.raises(winnow.InvalidArgument, match=text) as e:
            winnow.compressor.forward(**given, num_rows=number)
        assert e.value.argument == "num_rows"
    out = given["kv"].new_zeros(6, given["kv"].shape[1] // (2 if given.get("overlap") else 1))
    with pytest.raises(winnow.InvalidArgument, match="forward: rows: want 7 rows, .*, got 6"):
        winnow.compressor.forward(**given, out=out)
    for number in (-1, 35, 2**61):
        text = f"num_rows: want 0 to 34, the tokens of kv, got {number}"
        with pytest.raises(winnow.InvalidArgument, match=text):
            winnow.compressor.forward(**given, num_rows=number)
        with pytest.raises(winnow.InvalidArgument, match="kv: want 2 dimensions"):
            winnow.compressor.forward(**{**given, "kv": given["kv"][0]}, num_rows=number)
    plain = {**given, "norm_weight": None, "rows": None, "rstd": None}
    with pytest.raises(ValueError, match=r"rstd: want none, where norm_weight is absent"):
        winnow.compressor.forward(**{**given, "norm_weight": None}, num_rows=7, return_rstd=True)
    with pytest.raises(ValueError, match=r"rows: want a tensor, as norm_weight is, got none"):
        winnow.compressor.backward(
            **{**plain, "norm_weight": given["norm_weight"]},
            d_rows=torch.zeros(7, 64, dtype=torch.float64),
        )
    with pytest.raises(ValueError, match=r"d_norm_weight: want none, where norm_weight is absent"):
        winnow.compressor.backward(
            **plain,
            d_rows=torch.zeros(7, 64, dtype=torch.float64),
            d_norm_weight=torch.zeros(64, dtype=torch.float64),
        )
    assert not winnow.supports("compressor.forward", device="cuda")
