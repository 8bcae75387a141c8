"""The tables of docs/same_bits.md, cell by cell: of what the bits of a result do not depend."""

import contextlib
import re
from pathlib import Path

import pytest
import readme
import torch
from kinds import gpu
from ranks import run_all

import winnow
from winnow import compressor, indexer, paged_xl, sparse_mla
from winnow.expert_parallel import AllToAll, InProcessWorld, LowLatency

PAGE = Path(__file__).resolve().parents[2] / "docs" / "same_bits.md"
COLUMNS = ("batch", "chunks", "pages", "run", "threads", "graph", "ranks")
BF16, I32 = torch.bfloat16, torch.int32


def table():
    """[(backend, operation, column, cell)] of the page."""
    found = []
    for part in re.split("^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines()
                if line.startswith("| ")]  # fmt: skip
        if rows and rows[0][0] == "operation":
            names = rows[0]
            for row in rows[2:]:
                of = dict(zip(names, row, strict=True))
                operation = of["operation"].strip("`")
                backend = of.get("backend", "cpu")
                found += [(backend, operation, c, of[c]) for c in COLUMNS if c in of]
    return found


def cells():
    for backend, operation, column, cell in table():
        if cell:
            marks = () if backend == "cpu" else gpu
            name = f"{backend}-{operation}-{column}"
            yield pytest.param(backend, operation, column, cell, id=name, marks=marks)


def normal(seed, *shape, dtype=BF16):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=torch.float64).to(dtype)


def draw(seed, most, *shape):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, most, shape, generator=made, dtype=I32)


def below(ends, width):
    """A list of rows for each query, ascending, those that exceed its end absent."""
    rows = torch.arange(width, dtype=I32).expand(len(ends), width) * 3
    return torch.where(rows < ends[:, None], rows, -1).contiguous()


QUERIES, HEADS, ROWS, HIDDEN = 6, 45, 500, 2048
ALL = list(range(QUERIES))


class Operation:
    """An operation on problems of six queries, sequences or tokens; `options` go into the call.

    of(members) gives the results of those members, the first dimension of each being the members;
    sliced(begin, end) of a stretch of a sequence, before which all else has been; paged(order) with
    pages of another size and order, in the terms of the sequence.
    """

    def __init__(self, device, **options):
        self.device, self.options = device, options
        self._there = {}

    def to(self, *tensors):
        """On the device, copied once: what a CUDA graph records must not copy from the host."""
        return [self._copy(tensor) for tensor in tensors]

    def _copy(self, tensor):
        bits = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        key = tuple(tensor.shape), tensor.dtype, bits
        if key not in self._there:
            self._there[key] = tensor.to(self.device)
        return self._there[key]

    def of(self, members):
        raise NotImplementedError

    sliced = paged = None


class Forward(Operation):
    def problem(self, members):
        queries = normal(0, QUERIES, HEADS, 576)[members]
        return self.to(queries, normal(1, ROWS, 1, 576), draw(2, ROWS, QUERIES, 300)[members])

    def of(self, members):
        return sparse_mla.forward(*self.problem(members), **self.options)

    def sliced(self, begin, end):
        ends = torch.arange(1, QUERIES + 1, dtype=I32) * 80
        q, kv, _ = self.problem(slice(begin, end))
        (indices,) = self.to(below(ends, 160)[begin:end])
        kv = kv[: int(ends[end - 1])]  # no more than there are yet
        return sparse_mla.forward(q, kv, indices, **self.options)


class Distribution(Forward):
    def of(self, members):
        given = self.problem(members)
        return (sparse_mla.distribution(*given, sparse_mla.forward(*given)[2]),)

    sliced = None


class Backward(Forward):
    """Of dq alone where members differ: the others are sums over queries."""

    def of(self, members):
        given, (d_out,) = self.problem(members), self.to(normal(5, QUERIES, HEADS, 512)[members])
        out, _, lse = sparse_mla.forward(*given)
        dq, dkv = sparse_mla.backward(*given, out, lse, d_out, **self.options)[:2]
        return (dq, dkv) if len(members) == QUERIES else (dq,)

    sliced = None


class Decode(Operation):
    lengths = torch.tensor([300, 1, 250, 64, 299, 0], dtype=I32)

    def cache(self, slots, blocks, size):
        cache = torch.zeros(blocks, size, 1, 656, dtype=torch.uint8, device=self.device)
        sparse_mla.store(*self.to(normal(1, ROWS, 576)), cache, *self.to(slots))
        return cache

    def run(self, members, indices, cache):
        q, indices, lengths = self.to(
            normal(0, QUERIES, 2, HEADS, 576)[members], indices[members], self.lengths[members]
        )
        return sparse_mla.decode(q, cache, indices, topk_length=lengths, **self.options)

    def of(self, members):
        cache = self.cache(torch.arange(ROWS), 16, 32)
        return self.run(members, draw(2, ROWS, QUERIES, 2, 1500), cache)

    def paged(self, order):
        size, blocks = (32, 16) if order is None else (50, 10)
        order = torch.arange(blocks) if order is None else order[:blocks].argsort()
        at = torch.arange(ROWS)
        slots = order[at // size] * size + at % size
        chosen = slots[draw(2, ROWS, QUERIES, 2, 1500).long()].int()
        return self.run(ALL, chosen, self.cache(slots, blocks, size))


class Store(Decode):
    def of(self, members):
        cache = torch.zeros(1, QUERIES, 1, 656, dtype=torch.uint8, device=self.device)
        rows, slots = self.to(normal(1, QUERIES, 576)[members], torch.tensor(members))
        sparse_mla.store(rows, cache, slots)
        (at,) = self.to(torch.tensor(members))
        return (cache[0, at],)

    def paged(self, order):
        order = torch.arange(QUERIES) if order is None else order[:QUERIES].argsort()
        cache = torch.zeros(QUERIES, 7, 1, 656, dtype=torch.uint8, device=self.device)
        sparse_mla.store(*self.to(normal(1, QUERIES, 576)), cache, *self.to(order * 7))
        return (cache[self.to(order)[0], 0],)


class Indexer(Operation):
    scores = False

    def of(self, members, ends=None):
        ends = torch.tensor([400, 3, 500, 77, 500, 0], dtype=I32) if ends is None else ends
        weights = normal(3, QUERIES, 32, dtype=torch.float32)[members]
        rows = max(1, int(ends[members].max()))  # no more than there are yet
        q, weights, ends = self.to(normal(0, QUERIES, 32, 128)[members], weights, ends[members])
        k = self.to(normal(1, ROWS, 128))[0][:rows]
        limits = {"key_start": torch.zeros_like(ends), "key_end": ends}
        if not self.scores:
            return indexer.topk(q, k, weights, 64, return_scores=True, **limits)
        found = indexer.scores(q, k, weights, **limits)
        wide = found.new_full((len(q), ROWS), -torch.inf)
        wide[:, : found.shape[1]] = found
        return (wide,)

    def sliced(self, begin, end):
        ends = torch.arange(1, QUERIES + 1, dtype=I32) * 80
        return self.of(list(range(begin, end)), ends)


class Scores(Indexer):
    scores = True


class IndexerBackward(Operation):
    def of(self, members):
        weights = normal(3, QUERIES, 32, dtype=torch.float32)[members]
        d_scores = normal(4, QUERIES, 64, dtype=torch.float32)[members]
        q, weights, d_scores = self.to(normal(0, QUERIES, 32, 128)[members], weights, d_scores)
        (indices,) = self.to(draw(2, ROWS, QUERIES, 64)[members])
        k = self.to(normal(1, ROWS, 128))[0]
        dq, dk, d_weights = indexer.backward(q, k, weights, indices, d_scores, **self.options)
        return (dq, d_weights, dk) if len(members) == QUERIES else (dq, d_weights)


class Paged(Operation):
    """The indexer's pages, which always have 64 keys."""

    scores = False
    lengths = torch.tensor([200, 3, 130, 64, 65, 0], dtype=I32)

    def run(self, members, order):
        tables = order[: QUERIES * 4].view(QUERIES, 4).int()
        pages = torch.zeros(len(order), 64 * 132, dtype=torch.uint8, device=self.device)
        at = torch.arange(256)
        for i in range(QUERIES):
            slots = tables[i, at // 64].long() * 64 + at % 64
            keys, slots = self.to(normal(10 + i, 256, 128), slots)
            indexer.quantize(keys, pages=pages, slots=slots)
        q, scale = indexer.quantize(*self.to(normal(0, QUERIES * 32, 128)))
        q, weights = q.view(QUERIES, 1, 32, 128), scale.view(QUERIES, 1, 32)
        (at,) = self.to(torch.tensor(members))
        given = q[at], pages, weights[at]
        given += tuple(self.to(tables[members].contiguous(), self.lengths[members]))
        if self.scores:
            return (indexer.scores_paged(*given, max_context=256),)
        return indexer.topk_paged(*given, 50, positions=True, return_scores=True)

    def of(self, members):
        return self.run(members, torch.arange(30))

    def paged(self, order):
        return self.run(ALL, torch.arange(30) if order is None else order.argsort())


class ScoresPaged(Paged):
    scores = True


class Quantize(Operation):
    def of(self, members):
        return indexer.quantize(*self.to(normal(0, QUERIES, 128)[members]))


LENGTHS = (9, 4, 23, 1, 40, 8)
WINDOW = 4


class Compressor(Operation):
    """Sequences, whose rows are padded to the most that one has."""

    def tensors(self, spans):
        """kv, gate and more of stretches of sequences: [(sequence, begin, end)]."""
        kv = torch.cat([normal(20 + i, 50, 128)[b:e] for i, b, e in spans])
        gate = torch.cat([normal(30 + i, 50, 128)[b:e] for i, b, e in spans])
        lengths = torch.tensor([0, *(e - b for _, b, e in spans)], dtype=I32)
        angles = torch.arange(60)[:, None] * 0.5 ** torch.arange(8)
        fixed = {
            "position_bias": normal(3, WINDOW, 128, dtype=torch.float32),
            "norm_weight": normal(4, 64, dtype=torch.float32),
            "cos": angles.cos(), "sin": angles.sin(),
        }  # fmt: skip
        fixed = {name: self.to(t)[0] for name, t in fixed.items()}
        return self.to(kv, gate), self.to(lengths.cumsum(0, dtype=I32))[0], fixed

    def of(self, members):
        (kv, gate), starts, fixed = self.tensors([(i, 0, LENGTHS[i]) for i in members])
        counts = [LENGTHS[i] // WINDOW for i in members]
        (ends,) = self.to(torch.tensor([0, *counts]).cumsum(0, dtype=I32))
        options = {"cu_seqlens": starts, "cu_rows": ends, "overlap": True, **fixed}
        return self.call(kv, gate, options, members, counts)

    def call(self, kv, gate, options, members, counts):
        made = compressor.forward(kv, gate, num_rows=sum(counts), return_rstd=True, **options)
        return self.padded(made, counts)

    @staticmethod
    def padded(results, counts):
        return [torch.nn.utils.rnn.pad_sequence(t.split(counts), batch_first=True) for t in results]


class CompressorBackward(Compressor):
    """Of d_kv and d_gate: the other gradients are sums over sequences."""

    def call(self, kv, gate, options, members, counts):
        d_rows = torch.cat(
            [normal(40 + i, 20, 64)[:n] for i, n in zip(members, counts, strict=True)]
        )
        rows, rstd = compressor.forward(kv, gate, num_rows=sum(counts), return_rstd=True, **options)
        found = compressor.backward(
            kv, gate, rows=rows, rstd=rstd, d_rows=self.to(d_rows)[0], **options
        )
        return self.padded(found[:2], [LENGTHS[i] for i in members])


class CompressorStep(Compressor):
    def steps(self, calls):
        """calls: [(sequence, begin, end)] of each. Rows that complete a window, by sequence."""
        state = torch.full((QUERIES, 8, 256), torch.nan, device=self.device)
        rows = [[] for _ in range(QUERIES)]
        for spans in calls:
            (kv, gate), starts, fixed = self.tensors(spans)
            first = self.to(torch.tensor([b for _, b, _ in spans], dtype=I32))[0]
            slots = self.to(torch.tensor([i for i, _, _ in spans], dtype=I32))[0]
            got = compressor.step(
                kv, gate, cu_seqlens=starts, first_position=first, state=state, state_slots=slots,
                overlap=True, **fixed,
            )  # fmt: skip
            for (i, b, _), part in zip(spans, got.split([e - b for _, b, e in spans]), strict=True):
                rows[i] += [row for n, row in enumerate(part, b) if n % WINDOW == WINDOW - 1]
        return rows

    def of(self, members):
        rows = self.steps([[(i, 0, LENGTHS[i]) for i in members]])
        none = torch.zeros(1, 64, dtype=BF16, device=self.device)
        stacked = [torch.stack(rows[i]) if rows[i] else none for i in members]
        return (torch.nn.utils.rnn.pad_sequence(stacked, batch_first=True),)

    def sliced(self, begin, end):
        """Sequence 4 of 40 tokens, in stretches of 7 for each of six: all rows at the end."""
        if begin == 0 and end == QUERIES:
            calls = [[(4, 0, 40)]]
        else:
            bounds = [min(40, 7 * n) for n in range(QUERIES + 1)]
            calls = [[(4, b, e)] for b, e in zip(bounds, bounds[1:], strict=False) if b < e]
        return (torch.stack(self.steps(calls)[4])[:QUERIES][begin:end],)


class Attention(Operation):
    lengths = torch.tensor([60, 1, 33, 64, 17, 0], dtype=I32)

    def caches(self, blocks, size):
        keys = torch.zeros(blocks, 2, 4, size, 8, dtype=BF16, device=self.device)
        return keys, torch.zeros(blocks, 2, 32, size, dtype=BF16, device=self.device)

    def run(self, members, order, size):
        width = 64 // size
        tables = order[: QUERIES * width].view(QUERIES, width).int()
        keys, values = self.caches(len(order), size)
        at = torch.arange(64)
        slots = torch.cat([tables[i, at // size].long() * size + at % size for i in range(QUERIES)])
        paged_xl.append(
            *self.to(normal(1, QUERIES * 64, 2, 32), normal(2, QUERIES * 64, 2, 32)), keys, values,
            *self.to(slots),
        )  # fmt: skip
        query, tables, lengths = self.to(
            normal(0, QUERIES, 4, 32)[members], tables[members], self.lengths[members]
        )
        u, v, r = self.to(normal(5, 4, 32), normal(6, 4, 32), normal(7, 4, 64, 32))
        out = paged_xl.attention_fused(query, keys, values, u, v, r, None, tables, lengths)
        return out if isinstance(out, tuple) else (out,)

    def of(self, members):
        return self.run(members, torch.arange(40), 16)

    def paged(self, order):
        return self.run(ALL, torch.arange(60) if order is None else order.argsort(), 16)


class Append(Attention):
    def run(self, members, order, size):
        keys, values = self.caches(len(order), size)
        slots = order[members] * size
        given = self.to(normal(1, QUERIES, 2, 32)[members], normal(2, QUERIES, 2, 32)[members])
        paged_xl.append(*given, keys, values, *self.to(slots))
        (at,) = self.to(order[members])
        return keys[at, :, :, 0], values[at, :, :, 0]


class PositionTerm(Attention):
    def of(self, members):
        query, lengths = self.to(normal(0, QUERIES, 4, 32)[members], self.lengths[members])
        v, r = self.to(normal(6, 4, 32), normal(7, 4, 64, 32))
        term = paged_xl.position_term(query, v, r, lengths)
        seen = torch.arange(term.shape[-1], device=self.device) < lengths[:, None, None]
        return (torch.where(seen, term, 0),)  # what is behind is not written

    paged = None


class AllToAllCalls(Operation):
    """Six tokens, spread over ranks that are threads; experts that multiply by a number."""

    experts = 12
    dtype = torch.float32

    def of(self, members, ranks=1):
        made = torch.Generator().manual_seed(2)
        chosen = torch.stack([torch.randperm(self.experts, generator=made)[:4] for _ in ALL])
        # Addends that nearly cancel, so that even a sum in bfloat16 shows their order.
        weights = torch.tensor([1.0, -1.0, 1.0, -1.0]) / (1 + 0.37 * chosen)
        tokens = normal(0, QUERIES, HIDDEN, dtype=self.dtype)
        given = tokens[members], chosen.int()[members], weights[members]
        world = InProcessWorld(ranks)
        bounds = [len(members) * rank // ranks for rank in range(ranks + 1)]

        def rank_main(rank):
            mine = [t[bounds[rank] : bounds[rank + 1]].contiguous() for t in given]
            first = self.experts // ranks * rank
            factors = 1 + 0.37 * torch.arange(first, first + self.experts // ranks)
            return self.moved(world.transport(rank), world.store(), mine, factors)

        return (torch.cat(run_all(ranks, rank_main)),)

    def sizes(self):
        return {"max_tokens": QUERIES, "hidden": HIDDEN, "topk": 4, "experts": self.experts}

    def moved(self, transport, store, given, factors):
        tokens, experts, weights = given
        with AllToAll(transport, store, dtype="float32", **self.sizes()) as layer:
            got = layer.dispatch(tokens, experts, weights=weights)
            rows = layer.combine_buffer(got.descriptor)
            ends = got.descriptor.expert_offsets.tolist()
            for i, factor in enumerate(factors):
                rows[ends[i] : ends[i + 1]] = got.output[ends[i] : ends[i + 1]] * factor
            return layer.combine(rows, got.descriptor, weighted=True).clone()


class LowLatencyCalls(AllToAllCalls):
    dtype = BF16

    def moved(self, transport, store, given, factors):
        tokens, experts, weights = given
        layer = LowLatency(transport, store, **self.sizes())
        got = layer.dispatch(tokens, experts, format="bfloat16")
        rows = torch.zeros_like(got.output)
        for i, factor in enumerate(factors):
            count = int(got.counts[i])
            rows[i, :count] = got.output[i, :count] * factor
        return layer.combine(rows, got, experts, weights).clone()


OPERATIONS = {
    "sparse_mla::forward": Forward,
    "sparse_mla::distribution": Distribution,
    "sparse_mla::backward": Backward,
    "sparse_mla::decode": Decode,
    "sparse_mla::store": Store,
    "indexer::topk": Indexer,
    "indexer::scores": Scores,
    "indexer::topk_paged": Paged,
    "indexer::scores_paged": ScoresPaged,
    "indexer::backward": IndexerBackward,
    "indexer::quantize": Quantize,
    "compressor::forward": Compressor,
    "compressor::step": CompressorStep,
    "compressor::backward": CompressorBackward,
    "paged_xl::attention": Attention,
    "paged_xl::append": Append,
    "paged_xl::position_term": PositionTerm,
    "expert_parallel::all_to_all": AllToAllCalls,
    "expert_parallel::low_latency": LowLatencyCalls,
}


@contextlib.contextmanager
def threads(count):
    before = winnow.num_threads()
    winnow.set_num_threads(count)
    yield
    winnow.set_num_threads(before)


def same(got, want):
    assert len(got) and len(got) <= len(want)
    for a, b in zip(got, want, strict=False):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check_batch(operation):
    whole = operation.of(ALL)
    for members in ([0], [2], [5], [4, 1], [3, 2, 0]):
        got = operation.of(members)
        want = [w[members] for w in whole[: len(got)]]
        cut = [w[:, : g.shape[1]] if w.dim() > 1 else w for g, w in zip(got, want, strict=True)]
        same(got, cut)


def check_chunks(operation):
    whole = operation.sliced(0, QUERIES)
    for cuts in ((0, 3, 6), (0, 1, 2, 3, 4, 5, 6), (0, 5, 6)):
        parts = [operation.sliced(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        same([torch.cat(part) for part in zip(*parts, strict=True)], whole)


def check_pages(operation):
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    order = order if isinstance(operation, Attention) else order[order < 30]
    if isinstance(operation, (Decode, Store)):
        order = order[order < 10]
    same(operation.paged(order), operation.paged(None))


def check_run(operation):
    want = operation.of(ALL)
    for _ in range(4):
        same(operation.of(ALL), want)


def check_threads(operation):
    with threads(1):
        want = operation.of(ALL), operation.of([2])
    for count in (2, 3, 16):
        with threads(count):
            same(operation.of(ALL), want[0])
            same(operation.of([2]), want[1])


def check_graph(operation):
    want = operation.of(ALL)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        operation.of(ALL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = operation.of(ALL)
    graph.replay()
    torch.cuda.synchronize()
    same(got, want)


def check_ranks(operation):
    want = operation.of(ALL, ranks=1)
    for ranks in (2, 3, 6):
        same(operation.of(ALL, ranks=ranks), want)


CHECKS = {name: globals()[f"check_{name}"] for name in COLUMNS}


@pytest.mark.parametrize(("backend", "operation", "column", "cell"), list(cells()))
def test_a_cell(backend, operation, column, cell, monkeypatch):
    if backend == "cuda":  # others come before it where they have the operation, too
        monkeypatch.setenv("WINNOW_BACKEND", "cuda")
    options = dict.fromkeys(re.findall(r"`(\w+)`", cell), True)
    assert cell == "yes" or cell.startswith(("with ", "no")), cell
    tested = OPERATIONS[operation]("cpu" if backend == "cpu" else "cuda", **options)
    if cell == "no":
        with pytest.raises(AssertionError):
            CHECKS[column](tested)
    else:
        CHECKS[column](tested)


def test_the_tables_have_every_operation():
    integers = {"expert_parallel::layout", "expert_parallel::notify"}  # which only count
    listed = {
        (backend, operation)
        for operation, cells in readme.operations().items()
        for backend, cell in cells.items()
        if cell and operation not in integers
    }
    assert listed == {(backend, operation) for backend, operation, *_ in table()}


def test_the_checks_notice_what_depends():
    """Each check of the CPU on an operation whose bits hang on just that."""

    class Dependent(Operation):
        calls = 0

        def of(self, members, ranks=1):
            Dependent.calls += 1
            value = {"batch": len(members), "run": Dependent.calls, "ranks": ranks,
                     "threads": winnow.num_threads()}[self.options["on"]]  # fmt: skip
            return (torch.full((len(members), 2), float(value)),)

        def sliced(self, begin, end):
            return (torch.full((end - begin, 2), float(begin)),)

        def paged(self, order):
            return (torch.zeros(1) if order is None else torch.ones(1),)

    for column in ("batch", "chunks", "pages", "run", "threads", "ranks"):
        with pytest.raises(AssertionError):
            CHECKS[column](Dependent("cpu", on=column))
