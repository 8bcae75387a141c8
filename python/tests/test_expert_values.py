"""What combine of AllToAll takes beside rows: values of pairs, a second bias; SMs of a call."""

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


def as_kind(kind, array):
    return torch.from_numpy(array) if kind == "torch" else array


def problem_of(world, kind, indices_in=np.int32):
    """(inputs, indices) of every rank, of that kind, and the indices in numpy."""
    rng = np.random.default_rng(world)
    indices = [routing(rng, n, experts=E) for n in TOKENS[:world]]
    inputs = [as_kind(kind, payload(rank, n)) for rank, n in enumerate(TOKENS[:world])]
    return inputs, [as_kind(kind, table.astype(indices_in)) for table in indices], indices


def value_of(rank, token, k):
    """Of a pair, on the rank of its expert."""
    return np.float32(100 * rank + 10 * token + k + 0.5)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(("world", "local"), [(1, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("worst", [0, 72], ids=["counted", "worst-case"])
def test_values_of_pairs_come_home(kind, world, local, worst):
    """Expert-major: one a row, returned to its pair; 0 where a pair is dropped."""
    inputs, given, indices = problem_of(world, kind)
    rows = oracle.expert_rows(indices, E, world)[0]
    home = [np.zeros(table.shape, np.float32) for table in indices]
    for rank, token, k, _ in oracle.kept(indices, E):
        home[rank][token, k] = value_of(rank, token, k)

    def body(layer, rank):
        got = layer.dispatch(inputs[rank], given[rank], worst_case_rows=worst)
        values = np.full(worst or len(rows[rank]), np.nan, np.float32)
        values[: len(rows[rank])] = [value_of(*pair) for pair in rows[rank]]
        values = as_kind(kind, values)
        out, came = layer.combine(got.output, got.descriptor, pair_values=values)
        assert type(came) is type(inputs[rank]) and type(out) is type(came)
        np.testing.assert_array_equal(np.asarray(came), home[rank])
        np.testing.assert_array_equal(
            np.asarray(out), np.asarray(layer.combine(got.output, got.descriptor))
        )
        none, alone = layer.combine(None, got.descriptor, pair_values=values)
        assert none is None
        np.testing.assert_array_equal(np.asarray(alone), home[rank])

    with Ranks(world, **SIZES, local_world_size=local) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(("world", "local"), [(1, 1), (2, 2), (3, 3), (3, 1), (4, 2)])
@pytest.mark.parametrize("add", [False, True])
def test_values_of_token_major_rows(kind, world, local, add):
    """Each rank that a token goes to has K values for it: its own pairs', or with add_values a sum
    over the ranks in every column."""
    inputs, given, indices = problem_of(world, kind)
    rows, per_rank = oracle.token_rows(indices, E, world), E // world
    home = [np.zeros(table.shape, np.float32) for table in indices]
    for rank, token, k, expert in oracle.kept(indices, E):
        if not add:
            home[rank][token, k] = value_of(rank, token, k) * (expert // per_rank + 1)
    for at in range(world if add else 0):
        for source, token, _ in rows[at]:
            for k in range(3):
                home[source][token, k] += value_of(source, token, k) * (at + 1)

    def body(layer, rank):
        got = layer.dispatch(inputs[rank], given[rank], order="token_major")
        values = [
            [value_of(source, token, k) * (rank + 1) for k in range(3)]
            for source, token, _ in rows[rank]
        ]
        values = as_kind(kind, np.array(values, np.float32).reshape(-1, 3))
        _, came = layer.combine(got.output, got.descriptor, pair_values=values, add_values=add)
        np.testing.assert_array_equal(np.asarray(came), home[rank])

    with Ranks(world, **SIZES, local_world_size=local) as ranks:
        ranks.run(body)


def test_values_are_refused_where_they_do_not_fit():
    inputs, given, _ = problem_of(2, "numpy")

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
        layer.combine(got.output, got.descriptor, pair_values=values)

    with Ranks(2, **SIZES) as ranks:
        ranks.run(body)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("order", ["expert_major", "token_major"])
@pytest.mark.parametrize("world", [2, 3])
def test_two_biases_are_added_once(kind, order, world):
    inputs, given, _ = problem_of(world, kind)

    def body(layer, rank):
        got = layer.dispatch(inputs[rank], given[rank], order=order)
        first, second = (as_kind(kind, payload(i, TOKENS[rank]) / 8) for i in (7, 9))
        plain = layer.combine(got.output, got.descriptor)
        out = layer.combine(got.output, got.descriptor, bias=first, second_bias=second)
        want = np.asarray(plain) + np.asarray(first) + np.asarray(second)
        np.testing.assert_array_equal(np.asarray(out), want)
        wrong = {"second_bias": second} if rank == 1 else {"bias": first, "second_bias": second}
        with pytest.raises(ValueError, match="rank 1: second_bias: want"):
            layer.combine(got.output, got.descriptor, **wrong)

    with Ranks(world, **SIZES) as ranks:
        ranks.run(body)


def test_a_call_may_use_fewer_sms_than_the_layer():
    inputs, given, _ = problem_of(2, "numpy")

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
    inputs, given, indices = problem_of(3, "torch", indices_in)
    rows = oracle.token_rows(indices, E, 3)

    def body(layer, rank):
        x = inputs[rank].clone().requires_grad_(gradient)
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
