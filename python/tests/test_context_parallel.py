"""One sequence over several ranks gives what one rank gives. The ranks run the functions of
context_parallel_checks.py, context_parallel_ranks.py and context_parallel_models.py."""

import context_parallel_checks as checks
import context_parallel_ranks as ranks_of
import pytest
from ranks import spawn

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", checks.CHECKS)
def test_operations_of_ranks_are_those_of_one(deep_ep_pool, name, ranks):
    deep_ep_pool.run(ranks, checks.operations, name)


# Rows under torch.autocast, a backward pass that does not reach the rows, ranks that differ after
# they agreed, and what one rank refuses, which is an error on all.
@pytest.mark.parametrize(
    "ranks, body, keys",
    [(2, ranks_of.autocast, ()), (2, ranks_of.backward_of_a_part, ())]
    + [
        (ranks, body, (keys,))
        for ranks in (2, 3)
        for body in (ranks_of.differences, ranks_of.refusals_of_one)
        for keys in checks.KEYS
    ],
)
def test_programs_of_ranks(deep_ep_pool, ranks, body, keys):
    deep_ep_pool.run(ranks, body, *keys)


# Of each family with each number of ranks; the rest takes turns.
_STEPS = [
    (1, "plain", "balanced", "gathered", False),
    (2, "padding", "balanced", "gathered", False),
    (3, "packed", "contiguous", "sharded", True),
    (4, "dense", "balanced", "gathered", False),
]


@pytest.mark.parametrize("ranks, variant, placement, keys, by_caller", _STEPS)
@pytest.mark.parametrize("number", range(6))
def test_a_step_of_a_model_is_that_of_one_rank(
    deep_ep_pool, number, ranks, variant, placement, keys, by_caller, tmp_path
):
    models = pytest.importorskip("context_parallel_models")
    if number >= len(models.FAMILIES):
        pytest.skip("no family of the installed transformers")
    family = models.FAMILIES[number]
    torch.save(models.of_one_rank(family, variant), tmp_path / "expected")
    how = family, variant, placement, keys, by_caller, tmp_path / "expected"
    deep_ep_pool.run(ranks, models.step, *how)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")  # another name from 5.24 on
@pytest.mark.parametrize("variant", ["f8", "checkpointing", "pieces"])
@pytest.mark.parametrize("keys", checks.KEYS)
def test_ways_to_run_a_model(deep_ep_pool, variant, keys, tmp_path):
    models = pytest.importorskip("context_parallel_models")
    torch.save(models.of_one_rank("hy_v4", variant), tmp_path / "expected")
    how = "hy_v4", variant, "balanced", keys, False, tmp_path / "expected"
    deep_ep_pool.run(2, models.step, *how)


def test_what_a_model_refuses(deep_ep_pool):
    models = pytest.importorskip("context_parallel_models")
    deep_ep_pool.run(1, models.refusals)


def test_ranks_go_on_while_rows_and_gradients_are_on_their_way(deep_ep_pool, tmp_path):
    deep_ep_pool.run(2, ranks_of.overlaps, tmp_path)


@pytest.mark.parametrize("keys", checks.KEYS)
def test_what_autograd_keeps_does_not_grow_with_the_ranks(deep_ep_pool, keys):
    kept = [set(deep_ep_pool.run(ranks, ranks_of.memory, keys)) for ranks in (1, 2, 4)]
    assert kept[0] == kept[1] == kept[2] and len(kept[0]) == 1


def test_what_is_refused(deep_ep_pool):
    deep_ep_pool.run(2, ranks_of.refusals)
    wanted = "group: want torch.distributed, initialised, got none"
    with pytest.raises(ValueError, match=wanted):
        ranks_of.context_parallel()


def test_what_the_model_of_one_rank_refuses_is_an_error_on_all(deep_ep_pool):
    models = pytest.importorskip("context_parallel_models")
    deep_ep_pool.run(2, models.refusals_of_one)


def test_an_interrupt_ends_a_wait_for_another_rank(deep_ep_pool, tmp_path):
    deep_ep_pool.run(2, ranks_of.interrupted, tmp_path)


def test_a_rank_that_is_gone_is_an_error_on_the_others(tmp_path):
    spawn(ranks_of.rank_that_goes_on, (tmp_path,), 3)


def test_bench():
    pytest.importorskip("transformers")
    for row in checks.check_bench(2, 64, "--device", "cpu"):
        assert "reached" not in row


def test_bench_of_a_process_that_is_no_rank(capsys):
    bench = pytest.importorskip("winnow.transformers.bench_ranks")
    with pytest.raises(SystemExit) as ended:
        bench.main([])
    assert ended.value.code == 2 and "start it with torchrun" in capsys.readouterr().err
