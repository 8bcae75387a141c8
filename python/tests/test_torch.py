"""The torch operators: autograd, torch.compile. What torch checks of them, test_fakes.py has."""

import inspect

import problems
import pytest
import torch
import winnow.torch as ops
from compiled import assert_compiles
from problems import of_torch as _sparse
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import winnow


def _paged(dtype="float32"):
    p = {name: torch.from_numpy(a) for name, a in problems.paged_xl(dtype=dtype).items()}
    ops.paged_xl_append(p["key"], p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"])
    p["key_cache"].nan_to_num_()
    p["value_cache"].nan_to_num_()
    return p


def _ranges():
    """key_start and key_end of two queries."""
    return torch.tensor([[0, 3], [9, 5]], dtype=torch.int32).unbind()


def test_attention_gives_out_and_lse_of_forward():
    (q, kv, indices), options = _sparse(sink=True)
    out, _, lse = ops.sparse_mla_forward(q, kv, indices, **options)
    assert torch.equal(ops.sparse_mla_attention(q, kv, indices, **options), out)
    pair = ops.sparse_mla_attention(q, kv, indices, return_lse=True, **options)
    assert torch.equal(pair[0], out) and torch.equal(pair[1], lse)


def _two_sources():
    """As a layer of DeepSeek-V4 has them: q, then the arguments of a window of kv and of a list of
    rows of four tokens each."""
    (q, kv, indices), options = _sparse(s_q=2, s_kv=12, topk=4, sink=True)
    extra_kv = torch.randn(5, 1, 576, generator=torch.Generator().manual_seed(5))
    start, end = _ranges()
    two = {"key_start": start, "key_end": end, "q_start": 11, **options}
    return q, kv, {**two, "extra_kv": extra_kv, "extra_indices": indices, "extra_k_stride": 4}


@pytest.mark.filterwarnings("ignore")
def test_two_sources_compile():
    """What they give, test_sparse_mla.py has."""
    q, kv, two = _two_sources()
    sink = two.pop("attn_sink")

    def attend(q, kv, sink, extra_kv):
        given = {**two, "extra_kv": extra_kv}
        out, lse = ops.sparse_mla_attention(q, kv, None, attn_sink=sink, return_lse=True, **given)
        sums = ops.sparse_mla_distribution(q, kv, None, lse, **given)
        return out.square().sum(), torch.cat(sums, 1)

    assert_compiles(attend, (q, kv, sink, two["extra_kv"]), backend="aot_eager")


@pytest.mark.parametrize("swapped", [False, True])
def test_gradients_of_two_sources_are_those_of_backward(swapped):
    """Of a list with lengths and a range, either of which comes first."""
    (q, kv, indices), sink = _sparse(s_q=2, s_kv=12, topk=4, sink=True, invalid=0)
    start, end = _ranges()
    listed = {"indices": indices, "topk_length": torch.tensor([2, 3], dtype=torch.int32)}
    ranged = {"key_start": start, "key_end": end}
    first, extra = (ranged, listed) if swapped else (listed, ranged)
    options = {
        "indices": None,
        **first,
        **{f"extra_{name}": t for name, t in extra.items()},
        **sink,
    }
    options.update(scale=0.05, q_start=31, k_stride=2, extra_k_stride=3)
    leaves = [t.clone().requires_grad_() for t in (q, kv, kv.flip(0), sink["attn_sink"])]
    given = {**options, "extra_kv": leaves[2], "attn_sink": leaves[3]}
    out, _, lse = ops.sparse_mla_forward(leaves[0], leaves[1], **given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    (out * weights).sum().backward()
    dq, dkv, d_sink, dextra_kv = winnow.sparse_mla.backward(
        q, kv, out=out.detach(), lse=lse, d_out=weights, extra_kv=kv.flip(0), **options
    )
    for leaf, gradient in zip(leaves, (dq, dkv, dextra_kv, d_sink), strict=True):
        assert torch.count_nonzero(gradient) > 0 and torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("name", ["attn_sink", "extra_kv", "kv", "q"])
def test_two_sources_give_only_the_gradients_that_are_asked_for(name):
    q, kv, two = _two_sources()
    tensors = {"q": q, "kv": kv, **two}
    leaf = tensors[name].requires_grad_()
    ops.sparse_mla_attention(indices=None, **tensors).square().sum().backward()
    assert leaf.grad is not None
    others = [t for t in tensors.values() if isinstance(t, torch.Tensor) and t is not leaf]
    assert all(t.grad is None for t in others)


def test_dense_attention_has_the_gradient_of_its_rows_as_a_list():
    (q, kv, _), _ = _sparse(s_q=2)
    start, end = _ranges()
    rows = torch.arange(len(kv))
    listed = torch.where((rows >= start[:, None]) & (rows < end[:, None]), rows, -1).int()
    gradients = []
    for indices, ranges in ((None, {"key_start": start, "key_end": end}), (listed, {})):
        leaves = [t.clone().requires_grad_() for t in (q, kv)]
        ops.sparse_mla_attention(*leaves, indices, **ranges).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for dense, of_list in zip(*gradients, strict=True):
        assert torch.equal(dense, of_list) and torch.count_nonzero(dense) > 0


def test_gradients_reach_bfloat16_leaves():
    (q, kv, indices), _ = _sparse()
    gradients = []
    for dkv_dtype in (None, torch.float32):
        leaves = [t.bfloat16().requires_grad_() for t in (q, kv)]
        out = ops.sparse_mla_attention(*leaves, indices, dkv_dtype=dkv_dtype, deterministic=True)
        out.float().square().sum().backward()
        assert leaves[1].grad.dtype == torch.bfloat16
        gradients.append([leaf.grad for leaf in leaves])
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])  # both round once


def test_only_out_carries_a_gradient():
    (q, kv, indices), _ = _sparse()
    out, max_logits, lse = ops.sparse_mla_forward(q.requires_grad_(), kv, indices)
    assert out.requires_grad and not max_logits.requires_grad and not lse.requires_grad
    out.sum().backward()  # an expanded gradient: stride 0
    assert q.grad is not None and kv.grad is None
    assert not ops.sparse_mla_distribution(q, kv, indices, lse).requires_grad


def test_no_gradient_is_lost_in_silence():
    p = _paged()
    query = p["query"].requires_grad_()
    term = ops.paged_xl_position_term(query, p["pos_bias_v"], p["r"], p["context_lens"])
    with pytest.raises(RuntimeError, match="paged_xl_position_term has no gradient"):
        term.sum().backward()
    with pytest.raises(ValueError, match="key: .* requires no gradient"):
        ops.paged_xl_append(
            p["key"].requires_grad_(),
            p["value"],
            p["key_cache"],
            p["value_cache"],
            p["slot_mapping"],
        )


# torch's own, at the first torch.func.jvp of a process.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_forward_mode_is_an_error_that_names_the_operator():
    (q, kv, indices), _ = _sparse()
    lse = ops.sparse_mla_forward(q, kv, indices)[2]
    calls = {
        "sparse_mla_forward": lambda q: ops.sparse_mla_attention(q, kv, indices),
        "sparse_mla_distribution": lambda q: ops.sparse_mla_distribution(q, kv, indices, lse),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{name} has no forward-mode derivative"):
            torch.func.jvp(call, (q,), (q,))
        with forward_ad.dual_level():
            with pytest.raises(RuntimeError, match=f"{name} has no forward-mode derivative"):
                call(forward_ad.make_dual(q, q))
    p = _paged()
    others = (p["pos_bias_v"], p["r"], p["context_lens"])
    with pytest.raises(RuntimeError, match="paged_xl_position_term has no forward-mode"):
        torch.func.jvp(
            lambda query: ops.paged_xl_position_term(query, *others), (p["query"],), (p["query"],)
        )


def test_signatures_are_those_that_are_documented():
    (q, kv, indices), _ = _sparse()
    parameters = inspect.signature(ops.sparse_mla_attention).parameters
    assert parameters["return_lse"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(ops.sparse_mla_forward).parameters) == list(parameters)[:-1]
    for name in ops.__all__:
        assert getattr(ops, name).__doc__, name
    with pytest.raises(TypeError, match=r"sparse_mla_attention\(\) takes 3 positional .*, got 4"):
        ops.sparse_mla_attention(q, kv, indices, 0.5)
    with pytest.raises((TypeError, RuntimeError), match="return_lse"):
        ops.sparse_mla_forward(q, kv, indices, return_lse=True)


@pytest.mark.parametrize("gradient", [False, True])
def test_modes_of_torch_see_the_operator(gradient):
    """The short way from autograd to the kernel is for calls that nobody else wants to see."""

    class Seen(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            self.names.append(str(function))
            return function(*arguments, **(options or {}))

    (q, kv, indices), _ = _sparse()
    q.requires_grad_(gradient)
    want = ops.sparse_mla_attention(q, kv, indices)
    with Seen() as seen:
        got = ops.sparse_mla_attention(q, kv, indices)
        assert seen.names.count("winnow.sparse_mla_forward.default") == 1
        if gradient:
            got.sum().backward()
            assert seen.names.count("winnow.sparse_mla_backward.default") == 1
    assert torch.equal(got, want) and got.requires_grad == gradient


@pytest.mark.parametrize("which", range(3))
def test_one_tensor_without_memory_among_others_is_refused(which):
    """torch asks the function for empty results then: they would hold anything."""
    tensors, _ = _sparse()
    name = ("q", "kv", "indices")[which]
    tensors[which] = tensors[which].to("meta")
    with pytest.raises(ValueError, match=f"{name}: want a tensor on cpu, got one on meta") as e:
        ops.sparse_mla_attention(*tensors)
    assert isinstance(e.value, winnow.Error) and e.value.argument == name
    assert ops.sparse_mla_attention(*(t.to("meta") for t in tensors)).is_meta


def test_unknown_keywords_are_named():
    """Where all others are given, too, torch says only how many there are."""
    slots, cache = torch.arange(2), torch.zeros(1, 8, 1, 576, dtype=torch.bfloat16)
    rows = torch.zeros(2, 576, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'; it takes rows, cache"):
        ops.sparse_mla_store(rows, cache, slots, format="bf16", foo=1)
    with pytest.raises(TypeError, match=r"sparse_mla_store\(\) got .* 'slot'; .* 'slots'"):
        ops.sparse_mla_store(rows, cache, slot=slots)
    with pytest.raises(TypeError, match="'sink'; did you mean 'attn_sink'"):
        ops.sparse_mla_attention(*_sparse()[0], sink=None)


def test_errors_pass_through_the_operator():
    (q, kv, indices), _ = _sparse()
    with pytest.raises(ValueError, match="sparse_mla::forward: k_stride: want 1 or more, got 0"):
        ops.sparse_mla_attention(q, kv, indices, q_start=0, k_stride=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "backend"), [("float32", "inductor"), ("float64", "aot_eager")])
def test_compiled_with_gradients_in_one_graph(dtype, backend):
    """One compilation takes about 20 s on two cores: everything is in one function."""
    (q, kv, indices), options = _sparse(sink=True, dtype=dtype)
    p = _paged(dtype)
    step = [p[n] for n in ("query", "key_cache", "value_cache", "pos_bias_u")]
    tables = [p["block_tables"], p["context_lens"]]
    experts = torch.tensor([[0, 5, 8], [-1, 7, 7]], dtype=torch.int32)

    def model(q, kv, sink):
        out, lse = ops.sparse_mla_attention(2 * q, kv, indices, attn_sink=sink, return_lse=True)
        teacher = ops.sparse_mla_distribution(2 * q, kv, indices, lse)
        term = ops.paged_xl_position_term(p["query"], p["pos_bias_v"], p["r"], p["context_lens"])
        ops.paged_xl_append(
            p["key"], p["value"], p["key_cache"], p["value_cache"], p["slot_mapping"]
        )
        counts = ops.expert_parallel_layout(experts, 8, 4, 2)
        decoded = ops.paged_xl_attention(*step, term, None, *tables) + counts[2].sum()
        fused = ops.paged_xl_attention_fused(*step, p["pos_bias_v"], p["r"], None, *tables)
        return out.square().sum(), teacher.sum() + decoded.sum() + fused.sum()

    leaves = q, kv, options["attn_sink"]
    assert {result.dtype for result in model(*leaves)} == {q.dtype}
    assert_compiles(model, leaves, backend=backend)
