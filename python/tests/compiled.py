"""One model, run by torch in two ways."""

import torch


def assert_compiles(model, tensors, *, backend="inductor", **tolerance):
    """model(*leaves) returns a loss and another tensor: both, and the gradients, are the same of
    compiled code, in one graph."""
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        loss, other = run(*leaves)
        loss.backward()
        results.append([loss, other, *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, **tolerance)


def assert_replays(step, change):
    """A graph of step(), which returns tensors, gives what step() gives after `change` was made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        change()
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)
