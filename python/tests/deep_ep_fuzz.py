"""Random calls of deep_ep, each with a random mistake on a random rank; every rank runs play().

After each mistake, right calls must work. `python deep_ep_fuzz.py SECONDS [WORLD]` runs rounds for
that time, and prints those that fail.
"""

import random
import sys
import time

from deep_ep_calls import Calls, odd
from deep_ep_programs import seconds

NAMES = ("dispatch", "by_rank", "again", "combine", "permute", "by_index", "permuted_again",
         "unpermute", "elastic", "elastic_again", "elastic_combine", "low_latency",
         "low_latency_combine", "second", "second_combine", "wide", "wide_combine")  # fmt: skip


def _mistake(draw, name, call, given):
    """(what it is, the mistaken call)"""
    kind = draw.choice(["odd"] * 6 + ["unknown", "missing"] + ["another"] * 3)
    if kind == "odd":
        argument = draw.choice(list(given))
        choice, values = draw.randrange(1000), list(odd(given[argument]))
        what, value = values[choice % len(values)]
        return f"{argument} = {what}", call, {**given, argument: value}
    if kind == "unknown":
        return "comp_signal", call, {**given, "comp_signal": 1}
    if kind == "missing":
        argument = list(given)[0]
        rest = {key: value for key, value in given.items() if key != argument}
        return f"no {argument}", call, rest
    other = draw.choice([other for other in NAMES if other != name])
    return f"calls {other}", None, other


def _outcome(call):
    begin = time.monotonic()
    try:
        call()
        text = "it works"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begin
    return f"{text} (after {took:.0f} s)" if took > 3 else text


@seconds(8)
def play(group, seed, rounds):
    """[(what was done, its outcome on this rank, outcomes of right calls after it)]"""
    calls, outcomes, rank = Calls(group), [], group.rank()
    for name in NAMES:
        _right(calls, name, seed)
    for number in range(rounds):
        draw = random.Random(f"{seed} {number}")
        name = draw.choice(NAMES)
        mistaken = draw.randrange(group.size())
        try:
            call, given = getattr(calls, name)(draw)
            what, wrong, of = _mistake(draw, name, call, given)
            if wrong is None:  # all ranks prepare the arguments, which may take collective calls
                wrong, of = getattr(calls, of)(draw)
        except Exception as error:
            return [*outcomes, (f"{seed} {number}: {name} before a mistake", str(error), [])]
        if rank == mistaken:
            outcome = _outcome(lambda wrong=wrong, of=of: wrong(**of))
        else:
            outcome = _outcome(lambda call=call, given=given: call(**given))
        # Ranks that call different layers learn it before their deadline, and all layers must work.
        again = (name, *NAMES) if what.startswith("calls ") else (name, "second", name)
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
