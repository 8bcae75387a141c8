"""Fine-tunes a tiny model with DeepSeek Sparse Attention on a text, with Winnow.

    python finetune.py --text some.txt

The model is a GLM-5 of transformers with few layers and heads, which reads bytes. First it learns
to read, attending to all rows; then its indexers learn from it where it looks; then all learn, and
the model attends to the rows that its indexers choose. The program prints the loss, that of the
indexers, and the share of the attention that the chosen rows have; then the peak memory of a
training step with "winnow" and with "sdpa".
"""

import argparse
import sys
from pathlib import Path

import torch
import winnow.transformers
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from winnow.transformers.memory import peak


def make(topk, length, device, dtype):
    config = GlmMoeDsaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        mlp_layer_types=["dense", "dense"], num_attention_heads=4, num_key_value_heads=4,
        n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=64, q_lora_rank=96,
        qk_nope_head_dim=32, v_head_dim=32, index_n_heads=32, index_topk=topk,
        indexer_types=["full", "full"], max_position_embeddings=length,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GlmMoeDsaForCausalLM._from_config(config, attn_implementation="winnow", dtype=dtype)
    return model.to(device).train()


class Reader:
    """Random pieces of a text, as bytes."""

    def __init__(self, text, length, device):
        if len(text) <= length:
            sys.exit(f"finetune: the text has {len(text)} bytes; it needs more than {length}")
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
        self.length = length

    def batch(self, sequences):
        starts = torch.randint(0, len(self.bytes) - self.length, (sequences,))
        return torch.stack([self.bytes[s : s + self.length] for s in starts.tolist()])


def train(model, reader, arguments):
    """Prints a line now and then; returns what they say, by the stage."""
    print("stage    step    loss  indexers  attention to the chosen rows", flush=True)
    lines = {}
    for stage in ("dense", "warm-up", "sparse"):
        winnow.transformers.attend_densely(model, stage != "sparse")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(
                stage == "sparse" or ("indexer" in name) == (stage == "warm-up")
            )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=arguments.rate)
        steps = getattr(arguments, stage.replace("-", "_"))
        for step in range(steps):
            ids = reader.batch(arguments.batch)
            losses = [model(input_ids=ids, labels=ids, use_cache=False).loss]
            if stage != "dense":  # the indexers are frozen there, and nothing is kept for them
                losses.append(winnow.transformers.indexer_loss(model))
            if step % arguments.every == 0 or step == steps - 1:
                line = [loss.item() for loss in losses]
                if stage != "dense":
                    line.append(winnow.transformers.attention_share(model).item())
                print(f"{stage:8}{step:5d}{line[0]:8.3f}", end="")
                print(f"{line[1]:10.4f}{100 * line[2]:8.1f} %" if line[1:] else "", flush=True)
                lines.setdefault(stage, []).append(line)
            optimizer.zero_grad()
            sum(loss for loss in losses if loss.requires_grad).backward()
            optimizer.step()
    return lines


def step(model, ids):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"want 1 or more, got {text}")
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__), help="default: this program")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--length", type=positive, default=128, help="bytes of a sequence")
    parser.add_argument("--topk", type=positive, default=32, help="rows that a query attends to")
    parser.add_argument("--batch", type=positive, default=4, help="sequences of a step")
    parser.add_argument("--dense", type=positive, default=60, help="steps over all rows")
    parser.add_argument("--warm-up", type=positive, default=40, help="steps of the indexers alone")
    parser.add_argument("--sparse", type=positive, default=40, help="steps over the chosen rows")
    parser.add_argument("--rate", type=float, default=3e-3, help="of learning")
    parser.add_argument("--every", type=positive, default=20, help="steps from line to line")
    parser.add_argument(
        "--memory", type=positive, default=2048, help="tokens for which it is measured"
    )
    parser.add_argument("--check", action="store_true", help="an error if a loss did not fall")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device.startswith("cuda") else torch.float32
    longest = max(arguments.length, arguments.memory)
    model = make(arguments.topk, longest, arguments.device, dtype)
    try:
        text = arguments.text.read_bytes()
    except OSError as error:
        sys.exit(f"finetune: {error}")
    reader = Reader(text, arguments.length, arguments.device)
    lines = train(model, reader, arguments)

    print(f"peak memory of a training step, {arguments.memory} tokens")
    ids = torch.randint(0, 256, (1, arguments.memory), device=arguments.device)
    for implementation in ("winnow", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad(set_to_none=True)
        try:
            _, found = peak(lambda: step(model, ids), ids.device)
            print(f"  {implementation:8}{found / 2**20:8.0f} MiB")
        except (torch.OutOfMemoryError, OSError) as error:
            print(f"  {implementation:8}{type(error).__name__}: {error}")
    if arguments.check:
        learned = {
            "the loss": (lines["dense"][0][0], lines["sparse"][-1][0]),
            "the loss of the indexers": (lines["warm-up"][0][1], lines["warm-up"][-1][1]),
            "what the chosen rows lack": (1 - lines["warm-up"][0][2], 1 - lines["sparse"][-1][2]),
        }
        for name, (first, last) in learned.items():
            if last >= first:
                sys.exit(f"finetune: {name} did not fall: {first:.4f} at first, {last:.4f} at last")
        print("both losses fell, and the share of the chosen rows grew")


if __name__ == "__main__":
    main()
