"""Log probabilities of a trainer that are those of the engine, bit for bit.

    python same_bits.py

The engine generates from a tiny GLM-5 of transformers, token by token, from a cache, and its
indexers choose rows in float8, as those of serving engines do; the trainer runs the same model over
whole sequences. Training with reinforcement learning compares what both say of the same tokens, and
takes every difference for something to learn from. The program prints the largest one: with the
rows that the trainer's indexers choose and with those of the engine, with torch's functions as they
are and with functions that give a row the same bits in every batch.
"""

import argparse
import contextlib
import sys

import torch
import winnow.transformers as dsa
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

VOCABULARY = 256
aten = torch.ops.aten


def by_rows(function, rows, *others, dim=0):
    return torch.cat([function(row.clone(), *others) for row in rows.split(1, dim)], dim)


class RowByRow(TorchDispatchMode):
    """Within, torch's functions on the CPU treat every token as if it were alone.

    Two kinds do not otherwise. With which code a matrix product is made depends on how many rows
    there are, and the order of each sum with it. And a logistic function has other last bits where
    the elements at the end of a tensor do not fill a vector register. Rows are copied, since their
    alignment may count, too. This is slow, and made to be short; on a GPU take matrix products
    whose tiles are the same for any number of rows.
    """

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is aten.mm.default:
            return by_rows(function, *arguments)
        if function is aten.bmm.default:
            return by_rows(function, *arguments, dim=1)
        if function in (aten.sigmoid.default, aten.silu.default):
            (values,) = arguments
            return by_rows(function, values.flatten(0, -2)).view(values.shape)
        if "addmm" in function.__name__ or "grouped_mm" in function.__name__:
            raise NotImplementedError(f"same_bits: {function} is a product, too")
        return function(*arguments, **(options or {}))


def make(arguments):
    """A model of one dense layer and two with experts, whose indexers choose 16 rows."""
    torch.manual_seed(arguments.seed)
    config = GlmMoeDsaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"], num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=64, q_lora_rank=96, qk_nope_head_dim=32, v_head_dim=32,
        index_n_heads=32, index_topk=16, indexer_types=["full", "shared", "full"],
        initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._experts_implementation = "eager"  # a product for each expert
    dtype = getattr(torch, arguments.dtype)
    model = GlmMoeDsaForCausalLM._from_config(config, attn_implementation="winnow", dtype=dtype)
    return model.to(arguments.device).eval()


def log_probabilities(logits, tokens):
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def prompts(arguments):
    """[batch, tokens] with padding on the left, and its mask."""
    ids = torch.randint(1, VOCABULARY, (arguments.batch, arguments.prompt))
    padding = torch.randint(0, arguments.prompt // 2 + 1, (arguments.batch, 1))
    mask = (torch.arange(arguments.prompt) >= padding).long()
    return ids.to(arguments.device), mask.to(arguments.device)


def generate(model, ids, mask, new):
    """The tokens, what the model said of the new ones, and the rows that it chose."""
    with dsa.record(model) as choices:
        got = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=True,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    logits = torch.stack(got.logits, 1)
    return got.sequences, log_probabilities(logits, got.sequences[:, -new:]), choices


def train(model, tokens, mask, new):
    """What a forward pass for a gradient says of the new tokens. Positions are those of the engine:
    rotated by others, the same distance has other bits."""
    mask = torch.nn.functional.pad(mask, (0, new - 1), value=1)
    out = model(
        input_ids=tokens[:, :-1], attention_mask=mask, use_cache=False,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
    )  # fmt: skip
    got = log_probabilities(out.logits[:, -new:], tokens[:, -new:])
    got.mean().backward()
    return got.detach()


def main():
    parser = argparse.ArgumentParser(description="the same bits in an engine and a trainer")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=40, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens that are generated")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = make(arguments)
    ids, mask = prompts(arguments)
    print("functions     rows of   largest difference of log probabilities")
    for name, functions in (("torch's", contextlib.nullcontext), ("row by row", RowByRow)):
        dsa.choose_in_f8(model)
        with functions():
            tokens, engine, choices = generate(model, ids, mask, arguments.new)
        dsa.choose_in_f8(model, False)
        for rows in ("trainer", "engine"):
            given = dsa.replay(model, choices) if rows == "engine" else contextlib.nullcontext()
            with functions(), given:
                trainer = train(model, tokens, mask, arguments.new)
            worst = (trainer - engine).abs().max().item()
            print(f"{name:12}  {rows:8}  {worst:.7f}", flush=True)
    if worst != 0:
        sys.exit("same_bits: the last one should be 0")
    print("engine and trainer have the same bits")


if __name__ == "__main__":
    main()
