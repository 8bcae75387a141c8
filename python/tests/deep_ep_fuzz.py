"""Random calls of deep_ep, each with a random mistake on a random rank; every rank runs play().

After each mistake, right calls must work. `python deep_ep_fuzz.py SECONDS [WORLD]` runs rounds for
that time, and prints those that fail.
"""

import random
import sys
import time

import torch
from deep_ep_faults import Seconds
from deep_ep_odd import _odd
from winnow.compat import deep_ep

E, K, M = 12, 3, 64


class Calls:
    """Each method in NAMES returns a method of deep_ep and right arguments for it."""

    NAMES = ("dispatch", "by_rank", "again", "combine", "permute", "by_index", "permuted_again",
             "unpermute", "elastic", "elastic_again", "elastic_combine", "low_latency",
             "low_latency_combine", "second", "second_combine", "wide", "wide_combine")  # fmt: skip

    def __init__(self, group):
        self.rank, self.world = group.rank(), group.size()
        self.buffer = deep_ep.Buffer(group, low_latency_mode=True)
        self.other = deep_ep.Buffer(group)
        self.hybrid = deep_ep.HybridEPBuffer(group, 256, M, E // self.world)
        self.flexible = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=M)

    def inputs(self, draw, hidden=256):
        """(x, topk_idx, topk_weights) of tokens whose number all ranks draw, plus the rank."""
        n = draw.choice([0, 4, 30]) + self.rank
        generator = torch.Generator().manual_seed(draw.randrange(1000) * 8 + self.rank)
        x = torch.randn(n, hidden, generator=generator, dtype=torch.float32).bfloat16()
        weights, idx = torch.rand(n, E, generator=generator, dtype=torch.float32).topk(K, dim=1)
        return x, idx, weights

    def dispatch(self, draw, buffer=None, hidden=256):
        buffer = buffer or self.buffer
        x, idx, weights = self.inputs(draw, hidden)
        _, _, pairs, in_rank, _ = buffer.get_dispatch_layout(idx, E)
        return buffer.dispatch, {
            "x": x, "topk_idx": idx, "topk_weights": weights, "is_token_in_rank": in_rank,
            "num_tokens_per_expert": pairs, "expert_alignment": 1, "config": None,
        }  # fmt: skip

    def by_rank(self, draw):
        _, given = self.dispatch(draw)
        return self.buffer.dispatch, {
            name: given[name] for name in ("x", "is_token_in_rank", "num_tokens_per_expert")
        }

    def again(self, draw):
        call, given = self.dispatch(draw)
        return call, {"x": given["x"], "handle": call(**given)[4], "previous_event": None}

    def combine(self, draw, *arguments):
        call, given = self.dispatch(draw, *arguments)
        rows, _, weights, _, handle, _ = call(**given)
        of = {"x": rows, "handle": handle, "topk_weights": weights, "bias": given["x"]}
        return call.__self__.combine, of

    def second(self, draw):
        return self.dispatch(draw, self.other)

    def second_combine(self, draw):
        return self.combine(draw, self.other)

    def wide(self, draw):
        return self.dispatch(draw, self.buffer, 512)

    def wide_combine(self, draw):
        return self.combine(draw, self.buffer, 512)

    def permute(self, draw):
        x, idx, weights = self.inputs(draw)
        chosen, probs = deep_ep.indices_to_map(idx, weights, len(x), E)
        given = {"hidden": x, "routing_map": chosen, "probs": probs, "pad_multiple": 2}
        return self.hybrid.dispatch_with_permute, given

    def by_index(self, draw):
        x, idx, weights = self.inputs(draw)
        given = {"hidden": x, "topk_idx": idx, "topk_weights": weights, "num_of_experts": E}
        return self.hybrid.dispatch_with_permute, given

    def permuted_again(self, draw):
        call, given = self.permute(draw)
        return call, {"hidden": given["hidden"], "handle": call(**given)[4], "pad_multiple": 2}

    def unpermute(self, draw):
        call, given = self.permute(draw)
        rows, probs, _, _, handle = call(**given)
        of = {"hidden": rows, "probs": probs, "handle": handle}
        return self.hybrid.combine_with_unpermute, of

    def elastic(self, draw):
        x, idx, weights = self.inputs(draw)
        return self.flexible.dispatch, {
            "x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": E,
            "do_expand": draw.random() < 0.5, "num_sms": 0, "expert_alignment": 2,
        }  # fmt: skip

    def elastic_again(self, draw):
        call, given = self.elastic(draw)
        names = ("x", "topk_weights", "num_experts", "do_expand")
        return call, {**{name: given[name] for name in names}, "handle": call(**given)[3]}

    def elastic_combine(self, draw):
        call, given = self.elastic(draw)
        rows, _, weights, handle, _ = call(**given)
        of = {"x": rows, "handle": handle, "topk_weights": weights, "bias": given["x"]}
        return self.flexible.combine, of

    def low_latency(self, draw):
        x, idx, _ = self.inputs(draw)
        return self.buffer.low_latency_dispatch, {
            "x": x, "topk_idx": idx, "num_max_dispatch_tokens_per_rank": M, "num_experts": E,
            "use_fp8": False,
        }  # fmt: skip

    def low_latency_combine(self, draw):
        call, given = self.low_latency(draw)
        rows, _, handle, _, _ = call(**given)
        weights = torch.ones(given["topk_idx"].shape, dtype=torch.float32)
        of = {"x": rows, "topk_idx": given["topk_idx"], "topk_weights": weights, "handle": handle}
        return self.buffer.low_latency_combine, of


def _mistake(calls, draw, name, call, given):
    """(what it is, the mistaken call)"""
    kind = draw.choice(["odd"] * 6 + ["unknown", "missing"] + ["another"] * 3)
    if kind == "odd":
        argument = draw.choice(list(given))
        choice = draw.randrange(1000)
        odd = list(_odd(given[argument]))
        what, value = odd[choice % len(odd)]
        return f"{argument} = {what}", call, {**given, argument: value}
    if kind == "unknown":
        return "comp_signal", call, {**given, "comp_signal": 1}
    if kind == "missing":
        argument = list(given)[0]
        rest = {key: value for key, value in given.items() if key != argument}
        return f"no {argument}", call, rest
    other = draw.choice([other for other in calls.NAMES if other != name])
    return f"calls {other}", None, other


def _outcome(call):
    begin = time.monotonic()
    try:
        call()
        text = "it works"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return (
        f"{text} (after {time.monotonic() - begin:.0f} s)" if time.monotonic() - begin > 3 else text
    )


def play(group, seed, rounds):
    """[(what was done, its outcome on this rank, outcomes of right calls after it)]"""
    with Seconds(8):
        return _play(group, seed, rounds)


def _play(group, seed, rounds):
    calls, outcomes, rank = Calls(group), [], group.rank()
    for name in calls.NAMES:
        _right(calls, name, seed)
    for number in range(rounds):
        draw = random.Random(f"{seed} {number}")
        name = draw.choice(calls.NAMES)
        mistaken = draw.randrange(group.size())
        try:
            call, given = getattr(calls, name)(draw)
            what, wrong, of = _mistake(calls, draw, name, call, given)
            if wrong is None:  # all ranks prepare the arguments, which may take collective calls
                wrong, of = getattr(calls, of)(draw)
        except Exception as error:
            return [*outcomes, (f"{seed} {number}: {name} before a mistake", str(error), [])]
        if rank == mistaken:
            outcome = _outcome(lambda wrong=wrong, of=of: wrong(**of))
        else:
            outcome = _outcome(lambda call=call, given=given: call(**given))
        # Ranks that call different layers learn it before their deadline, and all layers must work.
        again = (name, *calls.NAMES) if what.startswith("calls ") else (name, "second", name)
        after = {_outcome(lambda right=right: _right(calls, right, seed)) for right in again}
        outcomes.append((f"{seed} {number}: {name}, rank {mistaken} {what}", outcome, after))
    return outcomes


def _right(calls, name, seed):
    call, given = getattr(calls, name)(random.Random(seed))
    call(**given)


def wrong(outcomes):
    """What is wrong with the outcomes of all ranks in one round; empty if nothing is."""
    what, texts = outcomes[0][0], [outcome for _, outcome, _ in outcomes]
    works = [text == "it works" for text in texts]
    if any(after != {"it works"} for _, _, after in outcomes):
        return "the next call does not work"
    if any(works) != all(works):
        return "not an error on every rank"
    if all(works):
        return ""
    for text in texts:
        if (" s)" in text or "waited" in text) and " calls " not in what:
            return "a deadline"
        if not text.startswith(("InvalidArgument: deep_ep.", "TypeError: ", "Error: deep_ep.")):
            return "an error without the method"
        if "expert_indices" in text or "expert_output" in text or "worst_case_rows" in text:
            return "an argument's internal name"
    return ""


def _main(seconds, world=2):
    import deep_ep_fuzz
    import deep_ep_ranks

    deep_ep_ranks._SECONDS = 3600
    pool = deep_ep_ranks.Pool(processes=world)
    end, seed, rounds = time.monotonic() + seconds, int(time.time()), 0
    while time.monotonic() < end:
        seed += 1
        for outcomes in zip(*pool.run(world, deep_ep_fuzz.play, seed, 25), strict=True):
            rounds += 1
            if problem := wrong(outcomes):
                print(problem, *(f"\n    {outcome}" for outcome in outcomes), flush=True)
    print(rounds, "rounds")
    pool.close()


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
