"""Serves sequences with DeepSeek Sparse Attention from a paged cache in 8 bits, with Winnow.

    python serve.py --format fp8_656

The model is one layer with random weights: a lightning indexer and sparse MLA attention. Requests
come with prompts of different lengths, wait until the cache has pages for them, decode together in
one batch, and leave. A prompt is read by indexer.topk and sparse_mla.forward; a step chooses rows
by indexer.topk_paged over a cache of keys and attends to them by sparse_mla.decode. After every
step the program computes the same query from all tokens of its sequence, without a cache.
"""

import argparse
import sys
from dataclasses import dataclass, field

import torch

from winnow import indexer, sparse_mla

PAGE = 64  # rows of a page, in both caches
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

    def prefill(self, tokens, first=0):
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


class Cache:
    """Pages for rows and for the indexer's keys, under the same numbers."""

    def __init__(self, format, columns, pages, device):
        self.format = format
        if format == "bf16":
            self.rows = torch.zeros(pages, PAGE, 1, columns, dtype=torch.bfloat16, device=device)
        elif format == "fp8_656":
            self.rows = torch.zeros(pages, PAGE, 1, 656, dtype=torch.uint8, device=device)
        else:  # the blocks are padded
            block = -(-PAGE * 584 // 576) * 576
            blocks = torch.zeros(pages, block, dtype=torch.uint8, device=device)
            self.rows = blocks[:, : PAGE * 584].unflatten(1, (PAGE, 1, 584))
        keys = PAGE * (INDEX_COLUMNS + 4)
        self.keys = torch.zeros(pages, keys, dtype=torch.uint8, device=device)
        self.free = list(range(pages))

    def write(self, projected, slots):
        slots = torch.tensor(slots, dtype=torch.int32, device=self.keys.device)
        sparse_mla.store(projected.row, self.rows, slots, format=self.format)
        indexer.quantize(projected.index_key, pages=self.keys, slots=slots)


@dataclass
class Sequence:
    tokens: list
    until: int  # tokens at which it is done
    table: list = field(default_factory=list)

    def slots(self, first):
        """Of the positions from `first` on."""
        return [self.table[t // PAGE] * PAGE + t % PAGE for t in range(first, len(self.tokens))]


class Server:
    def __init__(self, layer, cache):
        self.layer, self.cache = layer, cache
        self.device = cache.keys.device
        self.waiting, self.running = [], []

    def admit(self):
        """Reads the prompts of those that there are pages for, to their last token."""
        while self.waiting and len(self.cache.free) >= -(-self.waiting[0].until // PAGE):
            sequence = self.waiting.pop(0)
            pages = -(-sequence.until // PAGE)
            sequence.table = [self.cache.free.pop(0) for _ in range(pages)]
            tokens = torch.tensor(sequence.tokens, device=self.device)
            out, projected = self.layer.prefill(tokens)
            self.cache.write(projected, sequence.slots(0))
            sequence.tokens += self.layer.next_tokens(out[-1:]).tolist()
            self.running.append(sequence)

    def step(self):
        """One token of every running sequence. Returns what attention gave, [sequences, heads,
        512]."""
        lengths = [len(sequence.tokens) for sequence in self.running]
        tokens = torch.tensor([s.tokens[-1] for s in self.running], device=self.device)
        context_lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        projected = self.layer.project(tokens, context_lens - 1)
        self.cache.write(projected, [s.slots(len(s.tokens) - 1)[0] for s in self.running])
        width = max(len(sequence.table) for sequence in self.running)
        tables = torch.tensor(
            [s.table + [-1] * (width - len(s.table)) for s in self.running],
            dtype=torch.int32, device=self.device,
        )  # fmt: skip
        slots, chosen = indexer.topk_paged(
            projected.index_q[:, None], self.cache.keys, projected.index_weights[:, None], tables,
            context_lens, self.layer.topk,
        )  # fmt: skip
        out, _ = sparse_mla.decode(
            projected.q[:, None], self.cache.rows, slots, format=self.cache.format,
            topk_length=chosen,
        )  # fmt: skip
        out = out[:, 0]
        for sequence, token in zip(self.running, self.layer.next_tokens(out).tolist(), strict=True):
            sequence.tokens.append(token)
        return out

    def release(self):
        for sequence in [s for s in self.running if len(s.tokens) > s.until]:
            self.running.remove(sequence)
            self.cache.free += sequence.table


def without_cache(layer, sequence, device):
    """The attention of a sequence's last step from its tokens, the newest of which came of it."""
    tokens = torch.tensor(sequence.tokens[:-1], device=device)
    return layer.prefill(tokens, first=len(tokens) - 1)[0][0]


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"want 1 or more, got {text}")
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=PRECISION, default="fp8_656")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--requests", type=positive, default=6)
    parser.add_argument("--prompt", type=positive, default=300, help="tokens of the longest prompt")
    parser.add_argument(
        "--steps", type=positive, default=20, help="tokens that a request wants at most"
    )
    parser.add_argument("--pages", type=positive, default=14, help="pages of the cache")
    parser.add_argument("--topk", type=positive, default=64)
    a = parser.parse_args()
    columns = 512 if a.format == "fp8_584" else 576
    layer = Layer(columns, a.topk, a.device)
    server = Server(layer, Cache(a.format, columns, a.pages, a.device))
    made = torch.Generator().manual_seed(2)
    for _ in range(a.requests):
        prompt = int(torch.randint(1, a.prompt + 1, (), generator=made))
        more = int(torch.randint(1, a.steps + 1, (), generator=made))
        if -(-(prompt + more) // PAGE) > a.pages:
            sys.exit(f"serve: a prompt of {prompt} tokens needs more than {a.pages} pages")
        tokens = torch.randint(0, TOKENS, (prompt,), generator=made).tolist()
        server.waiting.append(Sequence(tokens, until=prompt + more))

    steps = queries = widest = 0
    worst = 0.0
    while server.waiting or server.running:
        server.admit()
        out = server.step()
        for sequence, got in zip(server.running, out.float(), strict=True):
            want = without_cache(layer, sequence, a.device).float()
            worst = max(worst, float((got - want).norm() / want.norm()))
        widest = max(widest, len(server.running))
        queries += len(server.running)
        steps += 1
        server.release()

    print(f"{steps} steps, {queries} tokens, up to {widest} sequences together")
    print(f"largest difference from the full computation: {worst:.4f} ({a.format})")
    if worst > PRECISION[a.format]:
        sys.exit(f"serve: it should be at most {PRECISION[a.format]}")
    if sorted(server.cache.free) != list(range(a.pages)):
        sys.exit("serve: not every page came back")
    print("every step equals the full computation, to the precision of the cache")


if __name__ == "__main__":
    main()
