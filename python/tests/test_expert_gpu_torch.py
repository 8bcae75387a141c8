"""The all-to-all on GPUs under torch: gradients, compiled code, the layer. Skipped without one."""

import numpy as np
import pytest
import torch
from expert_gpu import CONFIG, cuda, learn, loaded  # noqa: F401
from expert_launch import HERE, alone, documented_program  # noqa: F401
from expert_problems import problem
from kinds import gpu
from processes import python
from ranks import Ranks
from winnow.distributed import initialize_distributed

from winnow import expert_parallel as ep
from winnow.expert_parallel import autograd

pytestmark = [*gpu, pytest.mark.usefixtures("loaded")]


@pytest.mark.parametrize("order", ["expert_major", "token_major"])
@pytest.mark.parametrize("options", [{}, {"copy_out": True}, {"worst_case_rows": 40}])
def test_gradients(order, options):
    learn((5, 0, 8, 3), order, options, by_library=order == "expert_major" and options == {})


# ---- Compiled code.


def _mixture(layer, x, w, indices):
    """Whose experts square what they get; its size is fixed."""
    rows, given, descriptor = autograd.dispatch(layer, x, indices, weights=w, worst_case_rows=24)
    used = torch.arange(24, device=x.device) < descriptor.expert_offsets[-1]
    rows = torch.where(used[:, None], rows * rows * given[:, None], 0.0)
    return autograd.combine(layer, rows, descriptor)


def _mixture_want(x, w, indices):
    kept = (indices >= 0) & (indices < 8)
    return x * x * (w * kept).sum(1)[:, None]


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_has_values_and_gradients():
    torch._dynamo.reset()
    inputs, indices, weights = problem(6, (8,))
    x, w = cuda(np.sin(inputs[0])).requires_grad_(), cuda(weights[0]).requires_grad_()
    choice = cuda(indices[0])
    with Ranks(1, **CONFIG, arena_rows=1024) as ranks:
        out = torch.compile(_mixture, fullgraph=True)(ranks.layers[0], x, w, choice)
        out.sum().backward()
    got = [out, x.grad, w.grad]
    x.grad = w.grad = None
    want = _mixture_want(x, w, choice)
    want.sum().backward()
    for one, other in zip(got, [want, x.grad, w.grad], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_graphs_that_torch_records_leave_our_calls_out():
    torch._dynamo.reset()
    compiled = torch.compile(_mixture, fullgraph=True, mode="reduce-overhead")
    with Ranks(1, **CONFIG, arena_rows=4096) as ranks, torch.no_grad():
        for seed in range(6):
            tokens, choice, weights = (cuda(t[0]) for t in problem(seed, (8,)))
            out = compiled(ranks.layers[0], tokens, weights, choice)
            want = _mixture_want(tokens, weights, choice)
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def _plain_mixture(layer, x, w, indices):
    """The same by the layer's own calls, with rows in memory of their own."""
    got = layer.dispatch(x, indices, weights=w, worst_case_rows=24, copy_out=True)
    used = torch.arange(24, device=x.device) < got.descriptor.expert_offsets[-1]
    rows = torch.where(used[:, None], got.output * got.output * got.weights[:, None], 0.0)
    return layer.combine(rows, got.descriptor)


MIXTURES = {
    "compiled": lambda: torch.compile(_mixture, fullgraph=True),
    "eager": lambda: _mixture,
    "plain": lambda: _plain_mixture,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", MIXTURES)
def test_what_a_graph_records_keeps_its_memory(how):
    """Also the descriptor and the rows that nobody else has."""
    torch._dynamo.reset()
    mixture = MIXTURES[how]()
    x, indices, w = (cuda(t[0]) for t in problem(0, (8,)))

    def body(layer, rank):
        with torch.no_grad():
            mixture(layer, x, w, indices)  # compiles
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = mixture(layer, x, w, indices)
            for seed in range(1, 4):
                tokens, choice, weights = (cuda(t[0]) for t in problem(seed, (8,)))
                others = [layer.dispatch(tokens, choice, copy_out=i % 2 == 1) for i in range(8)]
                before = [other.output.clone() for other in others]
                x.copy_(tokens), w.copy_(weights), indices.copy_(choice)
                graph.replay()
                assert torch.equal(out, mixture(layer, tokens, weights, choice))
                for other, rows in zip(others, before, strict=True):
                    assert torch.equal(other.output, rows)  # not written to by the graph
                want = _mixture_want(tokens, weights, choice)
                torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
            stream.synchronize()
            del graph

    with Ranks(1, **CONFIG, arena_rows=4096) as ranks:
        ranks.run(body)


# ---- The layer of torch.


def test_one_process_is_a_world(alone):  # noqa: F811
    assert initialize_distributed(seed=4) == (0, 1)
    layer = ep.EPAll2AllLayer(None, 4, 8, 2, 0, 4, 1, 1, torch.float32, num_sm=3)
    assert layer.device == torch.device("cuda", 0) and layer._all_to_all.sm_count == 3
    tokens = torch.arange(24.0, device="cuda").view(3, 8)
    choice = torch.tensor([[3, 0], [4, 1], [-1, 4]]).int().cuda()
    output, weights, desc = layer.dispatch(tokens, choice)
    assert weights is None and torch.equal(output, tokens[[0, 1, 0]])
    assert torch.equal(desc.topk_indices_tensor, choice)
    combined = layer.combine(output, desc)
    assert torch.equal(combined, torch.stack([2 * tokens[0], tokens[1], 0 * tokens[2]]))
    assert layer.a2a_ctx.token_send_buf_rdma.device == layer.device
    layer.ep_barrier_all(torch.cuda.current_stream())
    layer.finalize()
    assert torch.equal(output, tokens[[0, 1, 0]])
    context = ep.DispatchCombineContext.create(layer.ep_config)
    assert context.signal_buf.is_cuda
    context.finalize()
    on_cpu = ep.EPAll2AllLayer(None, 4, 8, 2, 0, 4, 1, 1, torch.float32, device="cpu")
    assert torch.equal(on_cpu.dispatch(tokens.cpu(), choice.cpu())[0], output.cpu())
    on_cpu.finalize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_for_each_of_two_gpus(tmp_path):
    """The documented program and the checks of expert_program.py, over NVSHMEM."""
    example = tmp_path / "example.py"
    example.write_text(documented_program("torchrun")[0])
    result = python(
        "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2", HERE / "expert_program.py", example, tmp_path,
        add={"OMP_NUM_THREADS": "4", "WINNOW_TIMEOUT_SECONDS": "8"}, timeout=150,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert output.count("combined: torch.Size([128, 7168]) on cuda") == 2, output
    survivor = (tmp_path / "0.json").read_text()
    assert '"checked": true' in survivor and '"code": "timeout"' in survivor, output
