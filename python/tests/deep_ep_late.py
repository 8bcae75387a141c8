"""What test_deep_ep_gpu.py runs with inputs that another stream writes late: a rank of two."""

import torch
from winnow.compat import deep_ep

H, K, E, M = 512, 3, 12, 16


def _late(side, place, values):
    """The event behind a copy that a side stream makes some 30 ms from now."""
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        place.copy_(values)
        return deep_ep.EventHandle()


def _done(event):
    if event.event is not None:
        event.current_stream_wait()


def elastic(group):
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(8, H, generator=generator).bfloat16().cuda()
    idx = torch.rand(8, E, generator=generator).topk(K, dim=1).indices.cuda()
    weights = torch.rand(8, K, generator=generator).cuda()
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=M, hidden=H, num_topk=K)
    sizes = {"topk_idx": idx, "topk_weights": weights, "num_experts": E, "do_cpu_sync": False}
    side, late = torch.cuda.Stream(), torch.zeros_like(x)
    for expand in (False, True):
        rows, _, sent, handle, _ = buffer.dispatch(x, do_expand=expand, **sizes)
        used = int(handle.psum_num_recv_tokens_per_expert[-1]) if expand else None
        used = used or int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        sums = buffer.combine(rows, handle, bias=torch.ones_like(x))[0]
        for asynchronous in (False, True):
            for name in ("previous_event", "previous_event_before_epilogue"):
                options = {"async_with_compute_stream": asynchronous}
                late.zero_()
                torch.cuda.synchronize()
                options[name] = _late(side, late, x)
                got, _, weights_got, _, event = buffer.dispatch(
                    late, do_expand=expand, **sizes, **options
                )
                _done(event)
                assert torch.equal(got[:used], rows[:used])
                assert torch.equal(weights_got[:used], sent[:used])
                assert not expand or not got[used:].any()
                late.zero_()
                torch.cuda.synchronize()
                options[name] = _late(side, late, torch.ones_like(x))
                got, _, event = buffer.combine(rows, handle, bias=late, **options)
                _done(event)
                assert torch.equal(got, sums)
                torch.cuda.synchronize()
