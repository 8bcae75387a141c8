"""transformers' expert parallelism through its registry: outputs and gradients as its own."""

import pytest
import transformers_experts as programs


@pytest.mark.parametrize(
    ("ranks", "model", "dtype"),
    [(3, model, "float32") for model in programs.MODELS] + [(2, "qwen3_moe", "bfloat16")],
)
def test_outputs_and_gradients(deep_ep_pool, ranks, model, dtype):
    deep_ep_pool.run(ranks, programs.same_as_theirs, model, dtype)
