"""Sampling against a slow and obvious version, its distributions by chi-square, penalties, limits and errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.engine.sampling import Choice, Sampler, Sampling, distribution, logit_bias
from ds4.errors import Ds4Error


def obvious(logits: list[float], sampling: Sampling, allowed: list[bool] | None = None) -> dict[int, float]:
    """Probability of each token that may be drawn, step by step as the rule is stated."""
    tokens = [i for i, x in enumerate(logits) if math.isfinite(x) and (allowed is None or allowed[i])]
    tokens.sort(key=lambda i: (-logits[i], i))
    if sampling.temperature == 0:
        return {tokens[0]: 1.0}
    if sampling.top_k:
        tokens = tokens[: min(sampling.top_k, 1024)]
    weights = {i: math.exp((logits[i] - logits[tokens[0]]) / sampling.temperature) for i in tokens}
    total = sum(weights.values())
    p = {i: w / total for i, w in weights.items()}
    p = {i: x for i, x in p.items() if x >= sampling.min_p * p[tokens[0]] and x > 0}
    if sampling.top_p < 1:
        kept, reached = {}, 0.0
        for i in tokens:
            if i in p and (not kept or reached < sampling.top_p):
                kept[i] = p[i]
                reached += p[i]
        p = kept
    total = sum(p.values())
    return {i: x / total for i, x in p.items()}


LOGIT = st.floats(-30, 30, width=32) | st.integers(-3, 3).map(float) | st.sampled_from([math.nan, math.inf, -math.inf])
SETTINGS = st.builds(
    Sampling,
    temperature=st.just(0) | st.floats(0.05, 5),
    # Values that no sum of the probabilities of small logits hits exactly: there, rounding decides.
    top_p=st.sampled_from([0.0, 0.123456, 0.5432109, 0.87654321, 0.9876543, 1.0]),
    min_p=st.sampled_from([0.0, 0.0456789, 0.234567, 0.7654321, 1.0]),
    top_k=st.integers(0, 12),
)


@given(data=st.data(), logits=st.lists(LOGIT, min_size=1, max_size=40), sampling=SETTINGS)
@settings(max_examples=1000)
def test_distribution_equals_the_stated_rule(data: st.DataObject, logits: list[float], sampling: Sampling) -> None:
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    allowed = None if mask is None else torch.tensor(mask)
    if not any(math.isfinite(x) and (mask is None or mask[i]) for i, x in enumerate(logits)):
        with pytest.raises(Ds4Error, match="No token can be sampled"):
            distribution(torch.tensor(logits), sampling, allowed)
        return
    ids, probabilities = distribution(torch.tensor(logits), sampling, allowed)
    expected = obvious(logits, sampling, mask)
    assert dict(zip(ids.tolist(), probabilities.tolist(), strict=True)) == pytest.approx(expected, rel=1e-9)
    assert Sampler(sampling).sample(torch.tensor(logits), allowed=allowed) in expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(min_p=0),
        Sampling(min_p=0.05),
        Sampling(min_p=0, top_p=0.5),
        Sampling(min_p=0, top_p=0.97, temperature=3),
        Sampling(min_p=0.01, top_p=0.9, temperature=2),
        Sampling(min_p=0, top_k=50),
        Sampling(min_p=0, top_k=5000, temperature=4),
    ],
    ids=str,
)
def test_distribution_on_a_large_vocabulary(sampling: Sampling) -> None:
    """More tokens than the parts that are sorted, with many ties (values on a grid of 1/8)."""
    logits = (torch.randn(20_000, generator=torch.Generator().manual_seed(4)) * 16).round() / 8
    ids, probabilities = distribution(logits, sampling)
    expected = obvious(logits.tolist(), sampling)
    assert dict(zip(ids.tolist(), probabilities.tolist(), strict=True)) == pytest.approx(expected, rel=1e-9)


def chi_square_limit(freedom: int) -> float:
    """Value that chi-square exceeds with a probability of about 1e-4 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(min_p=0, seed=11),
        Sampling(temperature=0.5, min_p=0, seed=12),
        Sampling(temperature=2, min_p=0.1, seed=13),
        Sampling(top_p=0.8, min_p=0, seed=14),
        Sampling(top_k=5, min_p=0, seed=15),
        Sampling(temperature=1.5, top_p=0.9, min_p=0.02, top_k=20, seed=16),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    logits = torch.linspace(2, -3, 30)[torch.randperm(30, generator=torch.Generator().manual_seed(5))]
    expected = obvious(logits.tolist(), sampling)
    draws = 20_000
    sampler = Sampler(sampling)
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=30)
    assert set(np.flatnonzero(counts)) <= set(expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    assert chi_square < chi_square_limit(len(expected) - 1)


def test_masked_draws_follow_the_renormalised_distribution() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, math.nan])
    allowed = torch.tensor([False, True, False, True, True])
    sampler = Sampler(Sampling(min_p=0, seed=3))
    draws = [sampler.sample(logits, allowed=allowed) for _ in range(10_000)]
    assert set(draws) == {1, 3}
    share = 1 / (1 + math.exp(-2))
    assert abs(draws.count(1) / 10_000 - share) < 4 * math.sqrt(share * (1 - share) / 10_000)


# --- the random stream --------------------------------------------------------------------------------------------


def stream(sampler: Sampler, count: int = 30) -> list[int]:
    return [sampler.sample(torch.zeros(1000)) for _ in range(count)]


def test_the_same_seed_draws_the_same_tokens_whatever_others_do() -> None:
    alone = stream(Sampler(Sampling(seed=7)))
    mine, other = Sampler(Sampling(seed=7)), Sampler(Sampling(seed=8))
    torch.manual_seed(0)
    np.random.seed(0)
    mixed = [(mine.sample(torch.zeros(1000)), other.sample(torch.zeros(1000)))[0] for _ in range(30)]
    assert mixed == alone
    assert stream(Sampler(Sampling(seed=8))) != alone


@pytest.mark.parametrize("seed", [None, 0])
def test_without_a_seed_every_request_differs(seed: int | None) -> None:
    assert stream(Sampler(Sampling(seed=seed))) != stream(Sampler(Sampling(seed=seed)))


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1])
def test_seeds_of_64_bits(seed: int) -> None:
    assert stream(Sampler(Sampling(seed=seed))) == stream(Sampler(Sampling(seed=seed)))


def test_greedy_choices_do_not_move_the_stream() -> None:
    sampler = Sampler(Sampling(seed=7))
    first = stream(sampler, 10)
    sampler.sample(torch.zeros(5), greedy=True)
    assert first + stream(sampler, 20) == stream(Sampler(Sampling(seed=7)))


def test_the_logits_are_not_changed() -> None:
    logits = torch.tensor([1.0, math.nan, 2.0])
    Sampler(Sampling(seed=1)).sample(logits, allowed=torch.tensor([True, True, False]))
    assert torch.equal(logits.nan_to_num(9.0), torch.tensor([1.0, 9.0, 2.0]))


@pytest.mark.parametrize("sampling", [Sampling(seed=7), Sampling(seed=7, presence_penalty=0.3, logit_bias=((3, 1.0),))])
def test_a_row_of_any_batch_gives_the_same_tokens(sampling: Sampling) -> None:
    rows = torch.randn(4, 5, 1000, generator=torch.Generator().manual_seed(2)).transpose(0, 1)
    alone, batched, masked = Sampler(sampling), Sampler(sampling), Sampler(sampling)
    everything = torch.ones(1000, dtype=torch.bool)
    for row in rows:
        chosen = [alone.choose(row[2].clone(), top=3), batched.choose(row[2], top=3)]
        assert chosen[0] == chosen[1] == masked.choose(row[2], allowed=everything, top=3)


def test_each_answer_of_a_request_draws_a_stream_of_its_own() -> None:
    streams = [stream(Sampler(Sampling(seed=7), number)) for number in range(3)]
    assert streams[0] == stream(Sampler(Sampling(seed=7)))
    assert streams[0] != streams[1] != streams[2] != streams[0]
    assert streams[1] == stream(Sampler(Sampling(seed=7), 1))
    numbers = np.random.default_rng(7).random(30)  # a seed keeps its meaning
    assert streams[0] == [int(np.searchsorted(np.cumsum(np.full(1000, 1e-3)), number)) for number in numbers]


# --- bias and penalties -------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(1, 100), greedy=st.booleans())
@settings(max_examples=200)
def test_penalties_and_bias_equal_the_formula(data: st.DataObject, seed: int, greedy: bool) -> None:
    """logit + bias - frequency * times taken - presence * (taken at all), whoever took the tokens."""
    penalty = st.floats(-2, 2).map(lambda x: round(x, 2))
    bias = data.draw(st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=4))
    plain = Sampling(temperature=0 if greedy else 1, seed=seed)
    frequency, presence = data.draw(penalty), data.draw(penalty)
    full = Sampling(
        temperature=plain.temperature, seed=seed, frequency_penalty=frequency, presence_penalty=presence,
        logit_bias=tuple(bias.items()),
    )  # fmt: skip
    sampler, reference = Sampler(full), Sampler(plain)
    taken: list[int] = []
    for step in range(6):
        logits = torch.randn(10, generator=torch.Generator().manual_seed(step))
        offsets = [bias.get(i, 0.0) - frequency * taken.count(i) - presence * (i in taken) for i in range(10)]
        token = sampler.sample(logits)
        assert token == reference.sample(logits + torch.tensor(offsets, dtype=torch.float32))
        others = data.draw(st.lists(st.integers(0, 9), max_size=2))
        sampler.count(others)
        taken += [token, *others]


def test_syntax_is_chosen_by_the_model_alone() -> None:
    """What `greedy` asks for is not bent by bias or penalties, but it counts for them."""
    sampler = Sampler(Sampling(temperature=0, frequency_penalty=2, logit_bias=((1, -100.0),)))
    logits = torch.tensor([1.0, 2.0, 1.5])
    assert [sampler.sample(logits, greedy=True) for _ in range(3)] == [1, 1, 1]
    assert [sampler.sample(logits) for _ in range(4)] == [2, 0, 2, 0]


def test_a_bias_can_forbid_or_force_a_token() -> None:
    logits = torch.zeros(100)
    forbid = Sampler(Sampling(seed=1, logit_bias=tuple((i, -100.0) for i in range(99))))
    force = Sampler(Sampling(seed=1, logit_bias=((5, 100.0),)))
    assert {forbid.sample(logits) for _ in range(50)} == {99}
    assert {force.sample(logits) for _ in range(50)} == {5}


def test_a_bias_does_not_revive_what_cannot_be_chosen() -> None:
    sampler = Sampler(Sampling(seed=1, logit_bias=((0, 100.0), (1, 100.0))))
    logits = torch.tensor([-math.inf, 1.0, 1.0])
    assert sampler.sample(logits, allowed=torch.tensor([True, False, True])) == 2


def test_the_bias_of_a_request() -> None:
    assert logit_bias({"5": 1, 0: -100, "007": 2.5}, 10) == ((5, 1), (0, -100), (7, 2.5))
    assert logit_bias({}, 10) == ()
    for key in ("10", 10, -1, "-1", "x", "", 1.5, True, None, "9" * 30, "１"):
        with pytest.raises(Ds4Error, match=r"logit_bias has the key .* from 0 to 9"):
            logit_bias({key: 1}, 10)
    for value in (101, -100.5, math.nan, "1", None, True):
        with pytest.raises(Ds4Error, match=r"logit_bias of token 3 is .* from -100 to 100"):
            logit_bias({"3": value}, 10)
    assert len(logit_bias(dict.fromkeys(range(1024), 1), 2000)) == 1024
    with pytest.raises(Ds4Error, match="1025 entries; at most 1024"):
        logit_bias(dict.fromkeys(range(1025), 1), 2000)
    with pytest.raises(Ds4Error, match="token 9; the vocabulary has ids up to 4"):
        Sampler(Sampling(logit_bias=((9, 1.0),))).sample(torch.zeros(5))


# --- masks as bits ------------------------------------------------------------------------------------------------


@given(allowed=st.lists(st.booleans(), min_size=1, max_size=100), seed=st.integers(1, 50))
def test_bits_mean_the_same_as_bools(allowed: list[bool], seed: int) -> None:
    """Bits beyond the vocabulary mean nothing."""
    size = len(allowed)
    bits = np.array([*allowed, *[True] * (-size % 32)], np.uint32).reshape(-1, 32)
    words = torch.from_numpy((bits << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32).view(np.int32))
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    if not any(allowed):
        with pytest.raises(Ds4Error, match="none of them is allowed"):
            Sampler(Sampling()).sample(logits, allowed=words)
        return
    mask = torch.tensor(allowed)
    for greedy in (True, False):
        one, two = Sampler(Sampling(seed=seed)), Sampler(Sampling(seed=seed))
        assert one.sample(logits, greedy, words) == two.sample(logits, greedy, mask)
    ids, probabilities = distribution(logits, Sampling(), words)
    assert ids.tolist() == distribution(logits, Sampling(), mask)[0].tolist()
    assert probabilities.sum() == pytest.approx(1)


# --- log probabilities --------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_after_bias_and_penalties() -> None:
    """Neither temperature nor limits nor masks change them."""
    logits = torch.tensor([1.0, 3.0, math.nan, 2.0, -math.inf])
    sampling = Sampling(temperature=0.2, top_k=1, seed=1, presence_penalty=1.5, logit_bias=((0, 0.5),))
    sampler = Sampler(sampling)
    sampler.count([1])
    choice = sampler.choose(logits, allowed=torch.tensor([True, False, True, False, True]), top=5)
    expected = torch.log_softmax(torch.tensor([1.5, 1.5, 2.0]), 0).tolist()
    assert choice.token == 0
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(expected[0])
    assert [token for token, _ in choice.logprobs.top] == [3, 0, 1]
    assert [logprob for _, logprob in choice.logprobs.top] == pytest.approx(sorted(expected, reverse=True))


def test_logprobs_only_where_they_are_asked_for() -> None:
    sampler = Sampler(Sampling(temperature=0))
    logits = torch.tensor([0.0, 1.0])
    assert sampler.choose(logits) == Choice(1)
    choice = sampler.choose(logits, top=0)
    assert choice.logprobs is not None
    assert choice.logprobs.top == ()
    assert choice.logprobs.token == 1
    assert choice.logprobs.logprob == pytest.approx(-math.log1p(math.exp(-1)))
    for top in (-1, 21, True, 1.5):
        with pytest.raises(Ds4Error, match="top_logprobs is"):
            sampler.choose(logits, top=top)  # type: ignore[arg-type]


# --- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [Sampler(Sampling(temperature=0)), Sampler(Sampling(temperature=2, seed=1))])
def test_greedy_takes_the_lowest_id_of_the_best(sampler: Sampler) -> None:
    logits = torch.tensor([math.nan, 1.0, 5.0, 5.0, math.inf, 4.0])
    assert sampler.sample(logits, greedy=True) == 2
    assert sampler.sample(logits, greedy=True, allowed=torch.tensor([1, 1, 0, 0, 1, 1]).bool()) == 5


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0), Sampling(top_k=1), Sampling(temperature=1e-320), Sampling(temperature=1e-9, min_p=0)],
)
def test_the_best_token_stays_under_the_narrowest_settings(sampling: Sampling) -> None:
    assert distribution(torch.tensor([-50.0, 3.5, 3.0, -2.0]), sampling)[0].tolist() == [1]


def test_top_p_stops_at_the_token_that_reaches_it() -> None:
    equal = torch.zeros(4)
    assert sorted(distribution(equal, Sampling(top_p=0.5))[0].tolist()) == [0, 1]
    assert sorted(distribution(equal, Sampling(top_p=0.51))[0].tolist()) == [0, 1, 2]


def test_min_p_of_1_keeps_all_of_the_best() -> None:
    assert distribution(torch.tensor([2.0, 1.999, 2.0]), Sampling(min_p=1))[0].tolist() == [0, 2]


def test_the_smallest_min_p_and_the_largest_temperature_work() -> None:
    sampling = Sampling(temperature=1e308, min_p=5e-324, seed=1)
    ids, probabilities = distribution(torch.tensor([80.0, -80.0, -math.inf]), sampling)
    assert (ids.tolist(), probabilities.tolist()) == ([0, 1], [0.5, 0.5])


def test_a_token_of_no_weight_is_never_drawn() -> None:
    ids, probabilities = distribution(torch.tensor([0.0, -3000.0]), Sampling(min_p=0))
    assert (ids.tolist(), probabilities.tolist()) == ([0], [1.0])


def test_top_k_is_at_most_1024() -> None:
    assert len(distribution(torch.zeros(5000), Sampling(top_k=4000))[0]) == 1024


def test_half_precision_logits() -> None:
    assert Sampler(Sampling(temperature=0)).sample(torch.tensor([0.0, 2.0, 1.0], dtype=torch.bfloat16)) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0), Sampling(top_k=2, top_p=0.5)])
@pytest.mark.parametrize(
    ("logits", "allowed", "why"),
    [
        ([math.nan, math.inf, -math.inf], None, "no logit is a finite number"),
        ([1.0, 2.0, 3.0], [False, False, False], "none of them is allowed"),
        ([1.0, math.nan, 3.0], [False, True, False], "none of them is allowed"),
    ],
)
def test_nothing_to_choose_from_is_an_error(
    sampling: Sampling, logits: list[float], allowed: list[bool] | None, why: str
) -> None:
    with pytest.raises(Ds4Error, match=why):
        Sampler(sampling).sample(torch.tensor(logits), allowed=None if allowed is None else torch.tensor(allowed))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="vocab"):
        Sampler(Sampling()).sample(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="vocab"):
        Sampler(Sampling()).sample(torch.zeros(3), allowed=torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, -math.inf, "1", None, True]),
        ("top_p", [-0.1, 1.01, math.nan, math.inf, "1", None, False]),
        ("min_p", [-0.1, 1.01, math.nan, -math.inf, [], None]),
        ("top_k", [-1, 1.5, math.nan, "3", None, True]),
        ("seed", [1.0, "x", 2**64, -(2**63) - 1, True]),
        ("frequency_penalty", [-2.1, 2.01, math.nan, math.inf, "1", None, True]),
        ("presence_penalty", [-2.1, 2.01, math.nan, -math.inf, [], False]),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(Ds4Error, match=rf"^{name} is .*must be"):
            Sampling(**{name: value})  # type: ignore[arg-type]
