"""Serves a tiny DeepSeek-V4 from paged caches, with Winnow.

    python serve_v4.py

The model is one of transformers, with random weights and a layer of each kind. The server puts its
own attention in the place of that of each layer: a call has some new tokens of each of several
sequences, the pieces of a prompt as well as single tokens. Their rows go to the cache of the
sliding window by sparse_mla.store; compressor.step compresses them, and stores the rows of complete
windows in the pages of the layer; the indexer chooses among these by indexer.topk_paged; and
sparse_mla.decode attends to the window and to what was chosen, in one softmax. At the end the
program asks transformers for the same tokens, with attn_implementation="winnow".
"""

import copy
import sys

import torch
import winnow.transformers
from serving import PAGE, Server, arguments, cache_of, check_precision, draw_requests, tables_of
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from winnow import compressor, indexer, sparse_mla

VOCABULARY = 340
PIECE = PAGE  # tokens of a prompt that are read at a time

# How far the logits of a step may be from those of the whole text, relative to their norm.
PRECISION = {"bf16": 0.02, "fp8_584": 0.2}


def make_model(topk, device):
    torch.manual_seed(9)  # no step has two tokens that are nearly as likely
    config = DeepseekV4Config(
        # Layers with a sliding window alone, with a row for each 4 tokens of which an indexer
        # chooses topk (CSA), and with a row for each 128 tokens, all attended to (HCA).
        compress_ratios=[0, 4, 128, 4], num_hidden_layers=4, index_topk=topk,
        # Rows and the indexer's keys have the width of real models.
        head_dim=512, index_head_dim=128, sliding_window=128,
        vocab_size=VOCABULARY, hidden_size=64, num_attention_heads=2, q_lora_rank=48, o_groups=2,
        o_lora_rank=32, index_n_heads=8, hc_mult=2, hc_sinkhorn_iters=3, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, num_hash_layers=1,
        max_position_embeddings=4096, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = DeepseekV4ForCausalLM._from_config(config, attn_implementation="winnow")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "position_bias" in name:
                parameter.normal_(0.5, 0.3)
        model.get_input_embeddings().weight.normal_()
    return model.to(device).eval()


class Call:
    """What all layers of a call need: count new tokens of each sequence, up to `ends`."""

    def __init__(self, sequences, first, count, device):
        def integers(values):
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.first = integers(first)
        self.cu_seqlens = count * torch.arange(len(first) + 1, dtype=torch.int32, device=device)
        self.positions = self.first[:, None] + torch.arange(count, device=device)
        self.tables = tables_of(sequences, device)
        # The first page of a sequence is its own, and so are the states of that number.
        self.states = self.tables[:, 0].contiguous()

    def slots(self, rows):
        """Of rows [sequences, n] in the pages of each sequence."""
        pages = self.tables.gather(1, (rows // PAGE).long().clamp(max=self.tables.shape[1] - 1))
        return (pages * PAGE + rows % PAGE).int()


class Attention:
    """That of one layer, over caches; called in the place of the module's forward()."""

    def __init__(self, module, format, pages, positions, device):
        self.module, self.format, self.device = module, format, device
        self.call = None  # the server sets it
        # The window: the last rows of each sequence, those that the first of PIECE tokens sees too.
        self.ring = module.sliding_window + PIECE
        self.window = cache_of(pages * self.ring // PAGE, 512, format, device)
        self.ratio, self.angles, self.open = None, {}, {}
        if module.compressor is None:
            return
        self.ratio = module.compressor.compress_rate
        self.rows = cache_of(pages, 512, format, device)
        self.indexer = getattr(module.compressor, "indexer", None)
        if self.indexer is not None:
            keys = PAGE * (self.indexer.head_dim + 4)
            self.keys = torch.zeros(pages, keys, dtype=torch.uint8, device=device)
        for part in filter(None, (module.compressor, self.indexer)):
            ratio, columns = part.position_bias.shape
            tokens = ratio * (columns // part.head_dim)  # of a window
            self.open[part] = torch.empty(pages, tokens, 2 * columns, device=device)
            every = torch.arange(positions, device=device)[None]
            angles = part.rotary_emb(
                self.open[part], position_ids=every, layer_type=part.rope_layer_type
            )
            self.angles[part] = [t[0].float().contiguous() for t in angles]

    def compress(self, part, hidden, slots, **into):
        """New tokens into the state of a compressor, and complete rows into a cache."""
        cos, sin = self.angles[part]
        compressor.step(
            part.kv_proj(hidden).flatten(0, 1), part.gate_proj(hidden).flatten(0, 1),
            part.position_bias, self.call.cu_seqlens, self.call.first, self.open[part],
            self.call.states, overlap=part.position_bias.shape[1] > part.head_dim,
            norm_weight=part.kv_norm.weight, eps=part.kv_norm.variance_epsilon, cos=cos, sin=sin,
            slots=slots, **into,
        )  # fmt: skip

    def compressed(self, hidden, residual):
        """The slots of the compressed rows that each query attends to."""
        call, part = self.call, self.module.compressor
        # Of the row that each token would complete; those that complete none are not looked at.
        slots = call.slots(call.positions // self.ratio).flatten()
        complete = ((call.positions + 1) // self.ratio).int()  # rows that each query sees
        self.compress(part, hidden, slots, cache=self.rows)
        if self.indexer is None:
            every = torch.arange(max(int(complete.max()), 1), device=self.device)
            chosen = call.slots(every.expand(len(call.first), -1))
            seen = every < complete[..., None]
            return torch.where(seen, chosen[:, None], -1)
        self.compress(self.indexer, hidden, slots, pages=self.keys)
        part = self.indexer
        q = part.q_b_proj(residual).unflatten(-1, (-1, part.head_dim))
        angles = (t[call.positions] for t in self.angles[part])
        q, scale = indexer.quantize(apply_rotary_pos_emb(q, *angles, unsqueeze_dim=2).flatten(0, 1))
        weights = part.scorer.weights_proj(hidden).float()
        weights = weights * (part.scorer.softmax_scale * part.scorer.weights_scaling)
        return indexer.topk_paged(
            q.unflatten(0, weights.shape[:2]), self.keys, weights * scale.view(weights.shape),
            call.tables, complete, part.index_topk,
        )[0]  # fmt: skip

    def __call__(self, hidden, position_embeddings, **_):
        module, call = self.module, self.call
        cos, sin = position_embeddings[module.rope_layer_type]
        residual = module.q_a_norm(module.q_a_proj(hidden))
        q = module.q_b_norm(module.q_b_proj(residual).unflatten(-1, (-1, module.head_dim)))
        q = apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
        row = module.kv_norm(module.kv_proj(hidden))[:, :, None]
        row = apply_rotary_pos_emb(row, cos, sin, unsqueeze_dim=2)

        def places(positions):
            states = call.states.view(-1, *[1] * (positions.dim() - 1))
            return (states * self.ring + positions % self.ring).int()

        slots = places(call.positions).flatten()
        sparse_mla.store(row.flatten(0, 2).bfloat16(), self.window, slots, format=self.format)
        back = torch.arange(module.sliding_window, device=self.device)
        seen = call.positions[..., None] - back
        options = {}
        if self.ratio is not None:
            chosen = self.compressed(hidden, residual)
            options = {"extra_cache": self.rows, "extra_indices": chosen}
        values, _ = sparse_mla.decode(
            q.bfloat16(), self.window, torch.where(seen < 0, -1, places(seen)), format=self.format,
            scale=module.scaling, attn_sink=module.sinks, **options,
        )  # fmt: skip
        # Rows are values, too, and rotated by their own positions.
        values = apply_rotary_pos_emb(values.to(q.dtype), cos, -sin, unsqueeze_dim=2)
        groups = values.reshape(*hidden.shape[:2], module.config.o_groups, -1)
        return module.o_b_proj(module.o_a_proj(groups).flatten(2)), None


class Cached:
    """The model over caches."""

    def __init__(self, model, format, pages, positions, device):
        self.model, self.device = copy.deepcopy(model), device
        self.layers = []
        for layer in self.model.model.layers:
            attention = Attention(layer.self_attn, format, pages, positions, device)
            layer.self_attn.forward = attention
            self.layers.append(attention)
        # Tables are those of the shortest windows; others need less.
        self.tokens_of_page = PAGE * min(layer.ratio for layer in self.layers if layer.ratio)

    @torch.no_grad()
    def read(self, sequences, first, tokens):
        """The logits of the last tokens: [sequences, vocabulary]."""
        call = Call(sequences, first, len(tokens[0]), self.device)
        for layer in self.layers:
            layer.call = call
        logits = self.model(
            torch.tensor(tokens, device=self.device), position_ids=call.positions,
            attention_mask={"": None}, use_cache=False, logits_to_keep=1,
        ).logits  # fmt: skip
        return logits[:, -1]

    def prefill(self, sequence):
        for first in range(0, len(sequence.tokens), PIECE):
            logits = self.read([sequence], [first], [sequence.tokens[first : first + PIECE]])
        return logits.argmax().item()

    def step(self, sequences):
        """The logits and the next tokens."""
        first = [len(sequence.tokens) - 1 for sequence in sequences]
        logits = self.read(sequences, first, [sequence.tokens[-1:] for sequence in sequences])
        return logits, logits.argmax(-1).tolist()


@torch.no_grad()
def main():
    a = arguments(__doc__.splitlines()[0], PRECISION, pages=5)
    model = make_model(a.topk, a.device)
    winnow.transformers.choose_in_f8(model)  # as the pages of keys are
    longest = a.prompt + a.steps + PIECE
    server = Server(Cached(model, a.format, a.pages, longest, a.device), a.pages)
    requests = list(draw_requests(server, a, VOCABULARY))
    computed = {}

    server.run(lambda sequence, logits: computed.setdefault(id(sequence), []).append(logits))
    worst, same = 0.0, 0
    for sequence in requests:
        prompt = torch.tensor([sequence.tokens[: sequence.prompt]], device=a.device)
        more = len(sequence.tokens) - sequence.prompt
        text = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=more
        )
        same += text[0].tolist() == sequence.tokens
        # The logits of the steps, from the server's own tokens.
        tokens = torch.tensor([sequence.tokens[:-1]], device=a.device)
        want = model(tokens, use_cache=False, logits_to_keep=more - 1).logits[0]
        for got, row in zip(computed[id(sequence)], want, strict=True):
            worst = max(worst, float((got - row).norm() / row.norm()))
    check_precision(worst, PRECISION[a.format], a.format)
    print(f"{same} of {len(requests)} requests got the tokens of transformers")
    if same < len(requests) and a.format == "bf16":
        sys.exit("serve: all should")


if __name__ == "__main__":
    main()
