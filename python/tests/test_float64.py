"""float64 on the CPU: gradcheck in its standard form, and who refuses it. Results in float64 stand
beside those of the other dtypes."""

import problems
import pytest
import torch
import winnow.torch as ops
from problems import of_torch

import winnow

CASES = {
    "plain": ({"s_q": 2, "s_kv": 3}, {}),
    "576": ({"d_qk": 576, "s_q": 1, "h_q": 1}, {}),
    "sink": ({"sink": True}, {}),
    "scale": ({}, {"scale": 0.2}),
    "nothing visible": ({"invalid": 1.0, "sink": True}, {}),
    "repeated rows": ({"s_kv": 2, "invalid": 0}, {}),
    "causal": ({"sink": True, "s_q": 2}, {"q_start": 2, "k_stride": 3}),
    "lengths": ({"sink": True, "s_q": 2}, {"topk_length": torch.tensor([1, 3]).int()}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradcheck_in_its_standard_form(case):
    shape, more = CASES[case]
    (q, kv, indices), options = of_torch(
        dtype="float64", **{"s_q": 1, "h_q": 1, "s_kv": 2, "d_qk": 512, **shape}
    )
    leaves = [t.requires_grad_() for t in (q, kv, *options.values())]

    def attention(q, kv, sink=None):
        return ops.sparse_mla_attention(q, kv, indices, attn_sink=sink, **more)

    assert torch.autograd.gradcheck(attention, leaves)


def test_gradgradcheck_is_refused():
    (q, kv, indices), _ = of_torch(s_q=1, h_q=1, s_kv=2, d_qk=512, dtype="float64")
    leaves = [q.requires_grad_(), kv.requires_grad_()]
    with pytest.raises(RuntimeError, match="sparse_mla_backward has no gradient"):
        torch.autograd.gradgradcheck(
            lambda *leaves: ops.sparse_mla_attention(*leaves, indices), leaves, fast_mode=True
        )


def test_float64_beside_another_dtype_is_refused():
    """As the tests in C++ of each operation do for its other tensors."""
    (q, kv, indices), _ = of_torch(dtype="float64")
    lse = winnow.sparse_mla.forward(q, kv, indices)[2]
    p = {n: torch.from_numpy(a) for n, a in problems.paged_xl(dtype="float64").items()}
    with pytest.raises(ValueError, match="attn_sum: want dtype f64, got f32"):
        winnow.sparse_mla.distribution(q, kv, indices, lse, out=torch.empty(3, 7))
    with pytest.raises(ValueError, match="dkv: want dtype f64, got f32"):
        ops.sparse_mla_backward(q, kv, indices, q[..., :512], lse, q[..., :512],
                                dkv_dtype=torch.float32)  # fmt: skip
    with pytest.raises(ValueError, match="r: want dtype f64, got f32"):
        ops.paged_xl_position_term(p["query"], p["pos_bias_v"], p["r"].float(), p["context_lens"])
    with pytest.raises(ValueError, match="key_cache: want dtype f32, got f64"):
        caches = p["key_cache"], p["value_cache"]
        winnow.paged_xl.append(p["key"].float(), p["value"], *caches, p["slot_mapping"])
