"""Serves sequences with DeepSeek Sparse Attention from a paged cache in 8 bits, with Winnow.

    python serve.py --format fp8_656

The model is one layer with random weights: a lightning indexer and sparse MLA attention. Requests
come with prompts of different lengths, wait until the cache has pages for them, decode together in
one batch, and leave. A prompt is read by indexer.topk and sparse_mla.forward; a step chooses rows
by indexer.topk_paged over a cache of keys and attends to them by sparse_mla.decode. After every
step the program computes the same query from all tokens of its sequence, without a cache.
"""

from dataclasses import dataclass

import torch
from serving import PAGE, Server, arguments, cache_of, check_precision, draw_requests, tables_of

from winnow import indexer, sparse_mla

HEADS, INDEX_HEADS, INDEX_COLUMNS, ROPE = 16, 8, 128, 64
HIDDEN, TOKENS = 192, 997

# How far a step's output may be from that without a cache, relative to its norm: f8_e4m3 rounds to
# 1/16 at most and the weighted rows average it; bf16 rows are what the full computation has.
PRECISION = {"fp8_656": 0.06, "fp8_584": 0.06, "bf16": 0.005}


def rotate(x, positions):
    """The rotary embedding of the last columns of x [n, ..., columns]."""
    half = ROPE // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions.view(-1, *[1] * (x.dim() - 1)) * frequencies
    a, b = x[..., -ROPE:-half], x[..., -half:]
    turned = torch.cat(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
    )
    return torch.cat([x[..., :-ROPE], turned], -1)


@dataclass
class Projected:
    """What attention needs of n tokens."""

    q: torch.Tensor  # [n, heads, columns], bfloat16
    row: torch.Tensor  # [n, columns], bfloat16: key and value
    index_q: torch.Tensor  # [n, index heads, 128], float8_e4m3fn
    index_weights: torch.Tensor  # [n, index heads], with all scales of the queries
    index_key: torch.Tensor  # [n, 128]


class Layer:
    def __init__(self, columns, topk, device):
        self.columns, self.topk = columns, topk
        made = torch.Generator().manual_seed(1)

        def weights(n_in, n_out):
            return (torch.randn(n_in, n_out, generator=made) / n_in**0.5).to(device)

        self.embedding = weights(1, TOKENS * HIDDEN).view(TOKENS, HIDDEN)
        self.q = weights(HIDDEN, HEADS * columns)
        self.row = weights(HIDDEN, columns)
        self.index_q = weights(HIDDEN, INDEX_HEADS * INDEX_COLUMNS)
        self.index_key = weights(HIDDEN, INDEX_COLUMNS)
        self.index_weights = weights(HIDDEN, INDEX_HEADS)
        self.head = weights(HEADS * 512, TOKENS)

    def project(self, tokens, positions):
        x = self.embedding[tokens]
        q = (x @ self.q).unflatten(1, (HEADS, self.columns))
        index_q = (x @ self.index_q).unflatten(1, (INDEX_HEADS, INDEX_COLUMNS))
        index_q, scale = indexer.quantize(rotate(index_q, positions))
        return Projected(
            q=rotate(q, positions).bfloat16(),
            row=rotate(x @ self.row, positions).bfloat16(),
            index_q=index_q,
            index_weights=x @ self.index_weights * scale * (INDEX_HEADS * INDEX_COLUMNS) ** -0.5,
            index_key=rotate(x @ self.index_key, positions),
        )

    def attend(self, tokens, first=0):
        """Attention of the queries from position `first` on, from the tokens alone."""
        at = torch.arange(len(tokens), device=tokens.device)
        p = self.project(tokens, at)
        key, key_scale = indexer.quantize(p.index_key)
        indices, length = indexer.topk(
            p.index_q[first:], key, p.index_weights[first:], self.topk,
            k_scale=key_scale, q_start=first,
        )  # fmt: skip
        out, _, _ = sparse_mla.forward(p.q[first:], p.row[:, None], indices, topk_length=length)
        return out, p

    def next_tokens(self, out):
        return (out.float().flatten(1) @ self.head).argmax(1)


class Cached:
    """The layer over a cache: pages for rows and for the indexer's keys, under the same numbers."""

    tokens_of_page = PAGE

    def __init__(self, layer, format, pages, device):
        self.layer, self.format, self.device = layer, format, device
        self.rows = cache_of(pages, layer.columns, format, device)
        keys = PAGE * (INDEX_COLUMNS + 4)
        self.keys = torch.zeros(pages, keys, dtype=torch.uint8, device=device)

    def write(self, projected, slots):
        slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        sparse_mla.store(projected.row, self.rows, slots, format=self.format)
        indexer.quantize(projected.index_key, pages=self.keys, slots=slots)

    def prefill(self, sequence):
        out, projected = self.layer.attend(torch.tensor(sequence.tokens, device=self.device))
        self.write(projected, sequence.slots(range(len(sequence.tokens))))
        return self.layer.next_tokens(out[-1:]).item()

    def step(self, sequences):
        """What attention gives, [sequences, heads, 512], and the next tokens."""
        tokens = torch.tensor([s.tokens[-1] for s in sequences], device=self.device)
        lengths = [len(sequence.tokens) for sequence in sequences]
        context_lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        projected = self.layer.project(tokens, context_lens - 1)
        self.write(projected, [s.slots([len(s.tokens) - 1])[0] for s in sequences])
        slots, chosen = indexer.topk_paged(
            projected.index_q[:, None], self.keys, projected.index_weights[:, None],
            tables_of(sequences, self.device), context_lens, self.layer.topk,
        )  # fmt: skip
        out, _ = sparse_mla.decode(
            projected.q[:, None], self.rows, slots, format=self.format, topk_length=chosen
        )
        out = out[:, 0]
        return out, self.layer.next_tokens(out).tolist()


def main():
    a = arguments(__doc__.splitlines()[0], PRECISION, pages=14)
    layer = Layer(512 if a.format == "fp8_584" else 576, a.topk, a.device)
    server = Server(Cached(layer, a.format, a.pages, a.device), a.pages)
    list(draw_requests(server, a, TOKENS))
    worst = 0.0

    def check(sequence, got):
        """The step's attention from the tokens alone, the newest of which came of it."""
        nonlocal worst
        tokens = torch.tensor(sequence.tokens[:-1], device=a.device)
        want = layer.attend(tokens, first=len(tokens) - 1)[0][0].float()
        worst = max(worst, float((got.float() - want).norm() / want.norm()))

    server.run(check)
    check_precision(worst, PRECISION[a.format], a.format)
    print("every step equals the full computation, to the precision of the cache")


if __name__ == "__main__":
    main()
