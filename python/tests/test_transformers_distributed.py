"""A model of transformers with experts on two ranks: FSDP and tensor parallelism beside them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"tp_size": 2}], ids=["fsdp", "tp"])
def test_a_model_computes_what_it_does_alone(tmp_path, sizes):
    import transformers_distributed as programs

    torch.multiprocessing.spawn(programs.rank_of_world, (sizes, tmp_path), nprocs=programs.WORLD)
