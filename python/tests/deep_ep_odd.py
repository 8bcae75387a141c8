"""What the ranks of test_deep_ep_odd.py run: each call with an odd argument on the last rank."""

from random import Random

import torch
from deep_ep_calls import Calls, odd
from winnow.errors import InvalidArgument


def _outcome(call):
    try:
        call()
        return "it works", ""
    except InvalidArgument as error:
        return str(error), error.argument
    except BaseException as error:
        return f"{type(error).__name__}: {error}", ""


def each(group, names, sums, options):
    """[(method, argument, name of the odd value, outcome on this rank, outcome of the next call)]
    of those methods of Calls; the next call gives what `sums` of Calls gave before, if any."""
    calls, outcomes = Calls(group, tokens=(5,), **options), []
    mistaken = group.rank() == group.size() - 1

    def combined(of):
        call, given = getattr(calls, sums)(Random(0), **of)
        return call(**given)[0]

    for name in names:
        of = {"of": name} if name == "by_rank" else {}
        call, right = getattr(calls, name)(Random(0))
        back = combined(of) if sums else None

        def check(of=of, call=call, right=right, back=back):
            assert torch.equal(combined(of), back) if sums else call(**right)

        owner = getattr(call, "__self__", calls.buffer)
        method = f"deep_ep.{type(owner).__name__}.{call.__name__}"
        for argument, value in right.items():
            for what, wrong in odd(value):
                if name == "low_latency_combine":  # whose handle is that of one call
                    call, right = calls.low_latency_combine(Random(0))
                given = {**right, argument: wrong} if mistaken else right
                outcome = _outcome(lambda call=call, given=given: call(**given))
                outcomes.append((method, argument, what, outcome, _outcome(check)))
    return outcomes
