"""What a call of AllToAll takes beside rows: values of pairs, a number of SMs; ids of experts.
What comes of values and of two biases, deep_ep_programs.py has and all_to_all_soak.cc."""

import expert_oracle as oracle
import numpy as np
import pytest
import torch
from expert_problems import payload, routing
from ranks import Ranks

from winnow.expert_parallel import autograd

SIZES = {"max_tokens": 8, "hidden": 16, "topk": 3, "experts": 12, "dtype": "float32"}
TOKENS = (5, 0, 8, 3)
E = SIZES["experts"]


def problem_of(world):
    """(inputs, indices) of every rank."""
    rng = np.random.default_rng(world)
    indices = [routing(rng, n, experts=E) for n in TOKENS[:world]]
    return [payload(rank, n) for rank, n in enumerate(TOKENS[:world])], indices


def test_values_are_refused_where_they_do_not_fit():
    inputs, given = problem_of(2)

    def body(layer, rank):
        got = layer.dispatch(inputs[rank], given[rank])
        count = len(got.output)
        values = np.zeros(count, np.float32)
        for name, options in (
            ("pair_values", {"pair_values": np.zeros(count + 1, np.float32)}),
            ("pair_values", {"pair_values": values.astype(np.float64)}),
            ("add_values", {"pair_values": values, "add_values": True}),
        ):
            options = options if rank == 1 else {"pair_values": values}
            with pytest.raises(ValueError, match=f"rank 1: {name}: want"):
                layer.combine(got.output, got.descriptor, **options)
        _, came = layer.combine(got.output, got.descriptor, pair_values=values)
        assert came.shape == given[rank].shape and type(came) is np.ndarray

    with Ranks(2, **SIZES) as ranks:
        ranks.run(body)


def test_a_call_may_use_fewer_sms_than_the_layer():
    inputs, given = problem_of(2)

    def body(layer, rank):
        assert layer.sm_count == 8
        want = layer.dispatch(inputs[rank], given[rank])
        for few in (1, 8, 0):
            got = layer.dispatch(inputs[rank], given[rank], sm_count=few)
            np.testing.assert_array_equal(got.output, want.output)
            out = layer.combine(got.output, got.descriptor, sm_count=few)
            np.testing.assert_array_equal(out, layer.combine(want.output, want.descriptor))
        for many in (9, -1):
            many = many if rank == 1 else 8
            text = "rank 1: sm_count: want 0 to 8, the layer's, got"
            with pytest.raises(ValueError, match=text):
                layer.dispatch(inputs[rank], given[rank], sm_count=many)
            with pytest.raises(ValueError, match=text):
                layer.combine(want.output, want.descriptor, sm_count=many)

    with Ranks(2, **SIZES, sm_count=8) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("indices_in", [np.int32, np.int64])
@pytest.mark.parametrize("gradient", [False, True])
def test_expert_ids_of_a_dispatch_with_gradients(indices_in, gradient):
    inputs, indices = problem_of(3)
    given = [torch.from_numpy(table.astype(indices_in)) for table in indices]
    rows = oracle.token_rows(indices, E, 3)

    def body(layer, rank):
        x = torch.from_numpy(inputs[rank]).requires_grad_(gradient)
        options = {"order": "token_major", "return_expert_ids": True}
        output, weights, descriptor, ids = autograd.dispatch(layer, x, given[rank], **options)
        assert output.requires_grad == gradient and weights is None
        assert ids.dtype == torch.int32 and not ids.requires_grad
        assert ids.tolist() == [here for _, _, here in rows[rank]]
        if gradient:
            output.backward(torch.ones_like(output))
            times = torch.zeros(len(x), 1)
            for at in range(3):
                for token in [token for source, token, _ in rows[at] if source == rank]:
                    times[token] += 1
            assert torch.equal(x.grad, times.expand_as(x))
        assert len(autograd.dispatch(layer, x.detach(), given[rank], order="token_major")) == 3
        by_expert = autograd.dispatch(layer, x.detach(), given[rank], return_expert_ids=True)
        assert len(by_expert) == 4 and by_expert[3] is None

    with Ranks(3, **SIZES) as ranks:
        ranks.run(body)
