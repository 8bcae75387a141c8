"""Odd arguments of winnow.compat.deep_ep: all ranks refuse them, and the next call works."""

import deep_ep_odd as odd
import pytest

# What disagrees with an odd argument of one size or kind may be named in its place.
DISAGREES = {
    "x": {"is_token_in_rank", "topk_idx", "topk_weights"},
    "hidden": {"routing_map", "topk_idx", "scaling_factor"},
    "topk_idx": {"topk_weights", "routing_map"},
    "is_token_in_rank": {"num_tokens_per_expert"},
    "routing_map": {"probs"},
    "handle": {"topk_idx", "is_token_in_rank", "routing_map"},
    "scales": {"x"},
    "num_experts": {"topk_idx"},
}


_ELASTIC = ("elastic", "elastic_combine", "elastic_again")
# {what: (methods of Calls, which of them gives the sums that the next call has, options of Calls)}
METHODS = {
    "tokens": (("dispatch", "by_rank", "again", "combine", "scaled"), "combine", {}),
    "experts": (
        ("permute", "by_index", "permute_scaled", "permuted_again", "unpermute"), "unpermute", {},
    ),
    "elastic": (_ELASTIC, "elastic_combine", {"expand": False}),
    "expanded": (_ELASTIC, "elastic_combine", {"expand": True}),
    "low-latency": (("low_latency", "low_latency_combine"), "low_latency_combine", {}),
    "layouts": (("layout",), None, {}),
}  # fmt: skip


@pytest.mark.parametrize("what", METHODS)
def test_every_argument(deep_ep_pool, what):
    world = 2
    refused = 0
    for outcomes in zip(*deep_ep_pool.run(world, odd.each, *METHODS[what]), strict=True):
        method, name, how, _, _ = outcomes[0]
        texts = {text for _, _, _, (text, _), _ in outcomes}
        assert {after for *_, (after, _) in outcomes} == {"it works"}, outcomes
        # Of what differs each rank names itself first; of layout() nobody else hears.
        alone = what == "layouts"
        assert len(texts) == 1 or alone or all(" differs: " in text for text in texts), outcomes
        for _, _, _, (text, argument), _ in outcomes[-1:] if alone else outcomes:
            if text == "it works":
                continue
            refused += 1
            assert text.startswith(f"{method}: ") and "Error" not in text, (name, how, text)
            assert argument in {name, *DISAGREES.get(name, ())}, (name, how, text)
            assert alone or f"rank {world - 1}" in text, (name, how, text)
    assert refused > 20
