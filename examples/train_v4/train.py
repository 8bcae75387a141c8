"""Trains a tiny DeepSeek-V4 to remember, with Winnow.

    python train.py

The model reads a note, a long pause and questions about the note. By then the note lies outside of
the sliding windows, and only compressed rows still hold it. First the model learns to answer,
attending to all compressed rows; then its indexer learns from it where it looks; then both learn,
and the model attends to the rows that the indexer chooses. The program prints the loss, that of the
indexer, the share of the attention that the chosen rows hold, and the share of right answers; then
the model generates the answers to new questions.
"""

import argparse
import sys

import torch
import winnow.transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

KEYS, VALUES, PAUSE = "ABCDEFGH", "01234", "."
ALPHABET = KEYS + VALUES + PAUSE  # a token is a character
SPACING = 8  # tokens from note to note
QUESTIONS = 16  # at the end of a sequence


def make(topk, length, device, dtype):
    config = DeepseekV4Config(
        # One layer of each kind. All have a sliding window: the first layer has that alone. A layer
        # of ratio 4 ("compressed sparse attention", CSA) has one compressed row for each 4 tokens
        # beside it, a weighted mean of these and the 4 before, and an indexer that chooses topk
        # rows for each query. A layer of ratio 128 ("heavily compressed", HCA) has one row for each
        # 128 tokens, attends to all and needs no indexer.
        compress_ratios=[0, 4, 128], num_hidden_layers=3, sliding_window=16, index_topk=topk,
        # Rows have the width of real models, which the kernels are made for: one row is key and
        # value of all heads. The indexer's keys have 64 columns, or 128 as in real models.
        head_dim=512, index_head_dim=64,
        # All else is tiny. Heads are projected back in o_groups groups; hc_mult is how many copies
        # of the residual stream there are, which learned matrices mix.
        vocab_size=len(ALPHABET), hidden_size=64, num_attention_heads=2, q_lora_rank=64,
        o_groups=2, o_lora_rank=32, index_n_heads=4, hc_mult=2, hc_sinkhorn_iters=3,
        n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=64, num_hash_layers=0,
        max_position_embeddings=length, initializer_range=0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    # Any model of the family runs with this one argument, or after set_attn_implementation().
    model = DeepseekV4ForCausalLM._from_config(config, attn_implementation="winnow", dtype=dtype)
    return model.to(device).train()


class Notes:
    """Sequences such as ``..A3........C1...`` (notes), ``.....`` (a pause), ``CAAC`` (questions).

    The answers are the labels of the questions and not in the text, so that they can only come
    from the notes.
    """

    def __init__(self, count, length, device):
        needed = SPACING * count + QUESTIONS
        if length < needed:
            sys.exit(f"train: {count} notes and their questions need {needed} tokens, got {length}")
        self.count, self.length, self.device = count, length, device

    def batch(self, sequences):
        """Tokens and labels, [sequences, length]."""
        ids = torch.full((sequences, self.length), ALPHABET.index(PAUSE))
        labels = torch.full_like(ids, -100)  # no loss
        keys = torch.rand(sequences, len(KEYS)).argsort(-1)[:, : self.count]
        values = len(KEYS) + torch.randint(len(VALUES), keys.shape)
        places = torch.randint(SPACING - 1, keys.shape) + SPACING * torch.arange(self.count)
        ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
        asked = torch.randint(self.count, (sequences, QUESTIONS))
        ids[:, -QUESTIONS:] = keys.gather(1, asked)
        # transformers compares the output at a token with the label of the next one.
        labels[:, 1 - QUESTIONS :] = values.gather(1, asked)[:, :-1]
        return ids.to(self.device), labels.to(self.device)


def train(model, notes, arguments):
    """Prints a line every few steps; returns the numbers of these lines, by stage."""
    print("stage    step    loss   right   indexer  attention to the chosen rows", flush=True)
    lines = {}
    for stage in ("dense", "warm-up", "sparse"):
        # Before the last stage: to all compressed rows, as if there were no indexer. The window is
        # the same in all stages.
        winnow.transformers.attend_densely(model, stage != "sparse")
        # The language loss does not reach the indexer, whose choice has no gradient, nor does the
        # indexer's loss reach the model, which is its teacher. So either can be trained alone.
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(
                stage == "sparse" or ("indexer" in name) == (stage == "warm-up")
            )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=arguments.rate)
        steps = getattr(arguments, stage.replace("-", "_"))
        for step in range(steps):
            ids, labels = notes.batch(arguments.batch)
            output = model(input_ids=ids, labels=labels, use_cache=False)
            losses = [output.loss]
            if stage != "dense":
                # For the forward pass above: the divergence between the attention of each query to
                # the compressed rows and the softmax of the indexer's scores for them.
                losses.append(winnow.transformers.indexer_loss(model))
            if step % arguments.every == 0 or step == steps - 1:
                asked = labels[:, 1:] >= 0
                right = output.logits[:, :-1].argmax(-1) == labels[:, 1:]
                line = [losses[0].item(), right[asked].float().mean().item()]
                print(f"{stage:8}{step:5d}{line[0]:8.3f}{100 * line[1]:6.0f} %", end="")
                if stage != "dense":
                    # How much of the attention to all compressed rows the topk chosen ones hold.
                    share = winnow.transformers.attention_share(model).item()
                    line += [losses[1].item(), share]
                    print(f"{line[2]:10.4f}{100 * share:8.1f} %", end="")
                print(flush=True)
                lines.setdefault(stage, []).append(line)
            optimizer.zero_grad()
            sum(loss for loss in losses if loss.requires_grad).backward()
            optimizer.step()
    return lines


@torch.no_grad()
def answer(model, notes, sequences=8):
    """Generates the answers to the last questions of new sequences."""
    model.eval()
    ids, labels = notes.batch(sequences)
    ids, wanted = ids[:, :-1], labels[:, -1].cpu()  # the last question has no label
    # The cache holds the window's rows, all compressed rows, and tokens of incomplete windows.
    answers = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
    )[:, -1].cpu()  # fmt: skip
    text = "".join(ALPHABET[token] for token in ids[0].tolist())
    head, tail = text[: SPACING * notes.count], text[1 - QUESTIONS :]
    print(f"{head}... {len(text) - len(head) - len(tail)} tokens ...{tail}")
    print(f"  generated {ALPHABET[answers[0]]}, in the notes {ALPHABET[wanted[0]]}")
    print(f"{(answers == wanted).sum()} of {sequences} generated answers are right")


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"want 1 or more, got {text}")
    return number


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=here)
    parser.add_argument("--length", type=positive, default=192, help="tokens of a sequence")
    parser.add_argument(
        "--notes", type=int, choices=range(1, len(KEYS) + 1), default=1, help="of a sequence"
    )
    parser.add_argument("--topk", type=positive, default=16, help="compressed rows of a query")
    parser.add_argument("--batch", type=positive, default=8, help="sequences of a step")
    parser.add_argument("--dense", type=positive, default=40, help="steps over all rows")
    parser.add_argument("--warm-up", type=positive, default=10, help="steps of the indexer alone")
    parser.add_argument("--sparse", type=positive, default=10, help="steps over the chosen rows")
    parser.add_argument("--rate", type=float, default=3e-3, help="of learning")
    parser.add_argument("--every", type=positive, default=10, help="steps from line to line")
    parser.add_argument("--check", action="store_true", help="an error if a loss did not fall")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    notes = Notes(arguments.notes, arguments.length, arguments.device)
    model = make(arguments.topk, arguments.length + 1, arguments.device, dtype)
    lines = train(model, notes, arguments)
    answer(model, notes)
    if arguments.check:
        learned = {
            "the loss": (lines["dense"][0][0], lines["sparse"][-1][0]),
            "the loss of the indexer": (lines["warm-up"][0][2], lines["warm-up"][-1][2]),
        }
        for name, (first, last) in learned.items():
            if not last < first:
                sys.exit(f"train: {name} did not fall: {first:.4f} at first, {last:.4f} at last")
        print("both losses fell")


if __name__ == "__main__":
    main()
