"""layout, notify and the sizes against their definitions; what supports() says."""

import expert_oracle as oracle
import numpy as np
import pytest
import torch
from expert_problems import routing
from ranks import all_refuse, run_all, run_each

import winnow
from winnow import expert_parallel as ep


@pytest.mark.parametrize("as_kind", [np.asarray, torch.from_numpy])
def test_layout(as_kind):
    rng = np.random.default_rng(7)
    indices = routing(rng, 300, topk=6, experts=24)
    want = oracle.layout(indices, 24, 6, 2)
    got = ep.layout(as_kind(indices), 24, 6, 2)
    assert str(got[3].dtype).endswith("bool")
    for one, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)
    out = tuple(as_kind(np.zeros_like(np.asarray(one))) for one in got)
    assert ep.layout(as_kind(indices), 24, 6, 2, out=out)[0] is out[0]
    for one, expected in zip(out, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), expected)
    flags = as_kind(np.zeros((300, 6), np.uint8))
    ep.layout(as_kind(indices), 24, 6, 2, out=(None, None, None, flags))
    np.testing.assert_array_equal(np.asarray(flags), want[3])


def test_notify_tells_what_comes():
    rng = np.random.default_rng(3)
    tokens, channels, alignment = [7, 0, 12, 5], 4, 8
    indices = [routing(rng, n) for n in tokens]
    layouts = [oracle.layout(table, 8, 4, 2) for table in indices]
    world = ep.InProcessWorld(4)

    def body(rank):
        notifier = ep.Notifier(
            world.transport(rank), world.store(), experts=8, local_world_size=2, timeout=20
        )
        ranks, nodes, experts, in_rank = ep.layout(indices[rank], 8, 4, 2)
        got = notifier.notify(
            ranks, nodes, experts, in_rank, channels=channels, expert_alignment=alignment
        )
        per = -(-tokens[rank] // channels)
        ends = [min(per * (c + 1), tokens[rank]) for c in range(channels)]
        by_node = in_rank.reshape(tokens[rank], 2, 2).any(2)
        for c, end in enumerate(ends):
            np.testing.assert_array_equal(
                got.rank_channel_prefix_matrix[:, c], in_rank[:end].sum(0)
            )
            np.testing.assert_array_equal(
                got.node_channel_prefix_matrix[:, c], by_node[:end].sum(0)
            )
        received = np.cumsum([layouts[source][0][rank] for source in range(4)])
        np.testing.assert_array_equal(got.recv_rank_prefix_sum, received)
        passed = np.cumsum([layouts[2 * node + rank % 2][1][rank // 2] for node in range(2)])
        np.testing.assert_array_equal(got.recv_node_prefix_sum, passed)
        pairs = sum(layouts[source][2][2 * rank : 2 * rank + 2] for source in range(4))
        aligned = -(-pairs // alignment) * alignment
        np.testing.assert_array_equal(got.recv_pairs_per_expert, aligned)
        assert got.num_recv_tokens.tolist() == [received[-1]]
        assert got.num_forward_tokens.tolist() == [passed[-1]]
        assert notifier.totals.recv_tokens == received[-1]
        assert notifier.totals.forward_tokens == passed[-1]
        assert notifier.totals.recv_pairs_per_expert == aligned.tolist()
        again = ep.notify(
            notifier, ranks, nodes, experts, in_rank, channels=channels, out=got,
            worst_case_rows=99,
        )  # fmt: skip
        assert again.recv_rank_prefix_sum is got.recv_rank_prefix_sum
        np.testing.assert_array_equal(got.recv_pairs_per_expert, pairs)
        assert notifier.totals.recv_tokens == -1
        too_small = ep.QueueBuffers(
            bytes_per_token=64, node_recv_tokens=4, local_recv_tokens=4,
            node_buffer_bytes=10, local_buffer_bytes=10,
        )  # fmt: skip
        with pytest.raises(ValueError, match="got 10"):
            notifier.notify(ranks, nodes, experts, in_rank, queues=too_small)
        with pytest.raises(ValueError, match="rank 0: tokens_per_rank: .*got list"):
            notifier.notify([1] if rank == 0 else ranks, nodes, experts, in_rank)

    run_all(4, body)


def test_an_option_of_notify_of_the_wrong_type_is_an_error_on_all():
    indices = routing(np.random.default_rng(3), 4)
    world = ep.InProcessWorld(2)
    notifiers = run_all(
        2, lambda rank: ep.Notifier(world.transport(rank), world.store(), experts=8, timeout=30)
    )

    def notify(rank, **options):
        return notifiers[rank].notify(*ep.layout(indices, 8, 2, 2), **(options if rank else {}))

    for option, value, text in (
        ("channels", None, "want an integer of 64 bits, got None"),
        ("expert_alignment", "2", "want an integer of 64 bits, got '2'"),
        ("worst_case_rows", 0.5, "want an integer of 64 bits, got 0.5"),
        ("queues", 7, "want a QueueBuffers, got 7"),
        ("out", [], "want a Notified, got list"),
        ("stream", "x", "want None, a handle"),
    ):
        outcomes = run_each(
            2, lambda rank, option=option, value=value: notify(rank, **{option: value})
        )
        all_refuse(outcomes, f"^expert_parallel::notify: rank 1: {option}: {text}")
    other, own = run_each(2, lambda rank: notify(rank, chanels=3))
    assert isinstance(own, TypeError) and f"rank 1: {own}" in str(other)
    run_all(2, notify)  # it works on


def test_a_notifier_of_which_a_size_is_wrong_is_an_error_on_all():
    world = ep.InProcessWorld(2)
    transports = [world.transport(rank) for rank in range(2)]

    def make(rank):
        sizes = {"experts": 8, "local_world_size": "two" if rank else 2, "timeout": 30}
        return ep.Notifier(transports[rank], world.store(), **sizes)

    other, own = run_each(2, make)
    assert "experts: want the same on every rank, got 8 (rank 0), 0 (rank 1)" in str(other)
    assert "local_world_size: want an integer of 32 bits, got 'two'" in str(own)


def test_sizes():
    assert ep.source_meta_bytes(33) == 12
    # payload | source | scales | indices | weights
    assert ep.bytes_per_token(14336, 56, 8, 8) == 14336 + 8 + 224 + 32 + 32 + 8
    shape = {"bytes_per_token": 64, "recv_tokens": 10, "nodes": 4, "channels": 3}
    node = ep.node_buffer_layout(**shape, local_world_size=8)
    assert node.control_offset == 64 * 10 * 4 * 2 * 3
    assert node.control_words == (2 * 8 + 4) * 4 * 2 * 3
    assert node.bytes == node.control_offset + 4 * node.control_words
    local = ep.local_buffer_layout(**shape, local_world_size=8)
    assert local.control_offset == 64 * 10 * 8 * 3
    assert local.control_words == 8 * (2 * 4 + 2) * 3
    clean = ep.classic_clean_meta("between_nodes", **shape)
    assert (clean.offset, clean.count) == (node.control_offset // 4, node.control_words)
    clean = ep.classic_clean_meta("inside_node", **shape)
    assert (clean.offset, clean.count) == (local.control_offset // 4, local.control_words)
    with pytest.raises(ValueError, match="route: want between_nodes or inside_node"):
        ep.classic_clean_meta("sideways", **shape)


def test_supports():
    for op in ("dispatch", "combine", "layout", "notify"):
        assert winnow.supports(f"expert_parallel.{op}"), op
        answer = winnow.supports(f"expert_parallel.{op}", device="cuda")
        assert answer.supported == (answer.reason == "")
    assert winnow.supports("expert_parallel.dispatch", dtype="bfloat16", hidden=7168, topk=8)
    answer = winnow.supports("expert_parallel.dispatch", dtype="bfloat16", hidden=7)
    assert "hidden: want rows of a multiple of 16 bytes, got 14 bytes, 7 of bf16" in answer.reason
    assert "topk: want 1 to 32" in winnow.supports("expert_parallel.combine", topk=40).reason
    assert not winnow.supports("expert_parallel.dispatch", dtype="float8_e4m3fn")
    for op, size in (("dispatch", "topk"), ("combine", "experts"), ("notify", "experts")):
        for value in (2**32 + 2, "2"):
            reason = winnow.supports(f"expert_parallel.{op}", **{size: value}).reason
            assert reason == f"supports: {size}: want an integer of 32 bits, got {value!r}"
    with pytest.raises(TypeError, match="unknown size 'rows'"):
        winnow.supports("expert_parallel.dispatch", rows=3)
