"""transformers' expert parallelism through its registry: outputs and gradients as its own."""

import pytest
from deep_ep_ranks import Pool

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_outputs_and_gradients(pool, model):
    import transformers_experts as programs

    pool.run(3, programs.same_as_theirs, model, "float32")


def test_two_ranks_in_bfloat16(pool):
    import transformers_experts as programs

    pool.run(2, programs.same_as_theirs, "qwen3_moe", "bfloat16")
