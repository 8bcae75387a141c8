"""Shared by serve.py and serve_v4.py: sequences that own pages of a cache, and a loop that admits
them, decodes them in one batch, and releases them."""

import argparse
import sys
from dataclasses import dataclass, field

import torch

PAGE = 64  # rows of a page


@dataclass
class Sequence:
    tokens: list
    until: int  # it is done when it has more tokens
    table: list = field(default_factory=list)  # its pages
    prompt: int = 0  # tokens of its prompt

    def slots(self, rows):
        """The slots of the sequence's rows in the cache."""
        return [self.table[row // PAGE] * PAGE + row % PAGE for row in rows]


def tables_of(sequences, device):
    """[sequences, most pages of a sequence], -1 after the pages of each."""
    width = max(len(sequence.table) for sequence in sequences)
    tables = [s.table + [-1] * (width - len(s.table)) for s in sequences]
    return torch.tensor(tables, dtype=torch.int32, device=device)


def cache_of(pages, columns, format, device):
    """Pages of rows in a format of sparse_mla.decode."""
    if format == "bf16":
        return torch.zeros(pages, PAGE, 1, columns, dtype=torch.bfloat16, device=device)
    if format == "fp8_656":
        return torch.zeros(pages, PAGE, 1, 656, dtype=torch.uint8, device=device)
    padded = -(-PAGE * 584 // 576) * 576
    blocks = torch.zeros(pages, padded, dtype=torch.uint8, device=device)
    return blocks[:, : PAGE * 584].unflatten(1, (PAGE, 1, 584))


class Server:
    """A model has tokens_of_page, prefill(sequence), which reads a prompt and returns the next
    token, and step(sequences), which reads the last token of each and returns what it computed for
    them and their next tokens."""

    def __init__(self, model, pages):
        self.model, self.pages = model, pages
        self.free = list(range(pages))
        self.waiting, self.running = [], []

    def pages_of(self, sequence):
        return -(-sequence.until // self.model.tokens_of_page)

    def request(self, tokens, more):
        """Queues a prompt for which `more` tokens are to be generated."""
        sequence = Sequence(list(tokens), len(tokens) + more, prompt=len(tokens))
        if self.pages_of(sequence) > self.pages:
            sys.exit(f"serve: a prompt of {len(tokens)} tokens needs more than {self.pages} pages")
        self.waiting.append(sequence)
        return sequence

    def admit(self):
        """Admits waiting sequences for which there are pages, and reads their prompts."""
        while self.waiting and len(self.free) >= self.pages_of(self.waiting[0]):
            sequence = self.waiting.pop(0)
            sequence.table = [self.free.pop(0) for _ in range(self.pages_of(sequence))]
            sequence.tokens.append(self.model.prefill(sequence))
            self.running.append(sequence)

    def step(self):
        """Generates a token for every running sequence. Returns what the model computed."""
        computed, tokens = self.model.step(self.running)
        for sequence, token in zip(self.running, tokens, strict=True):
            sequence.tokens.append(token)
        return computed

    def release(self):
        for sequence in [s for s in self.running if len(s.tokens) > s.until]:
            self.running.remove(sequence)
            self.free += sequence.table

    def run(self, check):
        """Serves all sequences, with check(sequence, computed) after every step."""
        steps = queries = widest = 0
        while self.waiting or self.running:
            self.admit()
            for sequence, computed in zip(self.running, self.step(), strict=True):
                check(sequence, computed)
            widest = max(widest, len(self.running))
            queries += len(self.running)
            steps += 1
            self.release()
        print(f"{steps} steps, {queries} tokens, up to {widest} sequences together")
        if sorted(self.free) != list(range(self.pages)):
            sys.exit("serve: not every page was released")


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"want 1 or more, got {text}")
    return number


def arguments(description, formats, pages):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--format", choices=formats, default=next(iter(formats)))
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--requests", type=positive, default=6)
    parser.add_argument("--prompt", type=positive, default=300, help="tokens of the longest prompt")
    parser.add_argument(
        "--steps", type=positive, default=20, help="tokens that a request wants at most"
    )
    parser.add_argument("--pages", type=positive, default=pages, help="pages of the cache")
    parser.add_argument("--topk", type=positive, default=64)
    return parser.parse_args()


def draw_requests(server, a, vocabulary):
    made = torch.Generator().manual_seed(2)
    for _ in range(a.requests):
        prompt = int(torch.randint(1, a.prompt + 1, (), generator=made))
        more = int(torch.randint(1, a.steps + 1, (), generator=made))
        yield server.request(torch.randint(0, vocabulary, (prompt,), generator=made).tolist(), more)


def check_precision(worst, most, format):
    print(f"largest difference from the full computation: {worst:.4f} ({format})")
    if worst > most:
        sys.exit(f"serve: it should be at most {most}")
