"""The seams of the graph: slices of layers, taps, edits, and how sparse layers choose their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds4.model import DeepseekV4, Edits, ModelWeights, Slice, Taps, TensorSource
from tests.helpers import SMALL, random_engine, random_tensors

IDS = torch.randint(0, SMALL.vocab, (70,), generator=torch.Generator().manual_seed(1))
EVERY = torch.arange(70)


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return DeepseekV4(ModelWeights.load(TensorSource(SMALL, random_tensors(SMALL, 1))), qat_sim=True)


def whole(model: DeepseekV4, **options: Any) -> torch.Tensor:
    logits = model.forward([Slice(model.new_state(), IDS)], wanted=EVERY, **options).logits
    assert logits is not None
    return logits


def test_a_slice_of_layers_runs_alone(model: DeepseekV4) -> None:
    """Two models that hold half of the layers each, as two machines would, give the whole model's logits."""
    source = TensorSource(SMALL, random_tensors(SMALL, 1))
    lower = DeepseekV4(ModelWeights.load(source, range(2)), qat_sim=True)
    upper = DeepseekV4(ModelWeights.load(source, range(2, 5)), qat_sim=True)
    a, b, logits = lower.new_state(), upper.new_state(), []
    for part in IDS.split([33, 1, 36]):
        hidden = lower.forward([Slice(a, part)]).hidden
        result = upper.forward([Slice(b, part)], hidden=hidden, wanted=torch.arange(len(part)))
        assert result.logits is not None
        logits.append(result.logits)
        a.advance(len(part))
        b.advance(len(part))
    assert torch.equal(torch.cat(logits), whole(model))


def test_a_slice_can_be_chosen_of_a_whole_model(model: DeepseekV4) -> None:
    state = model.new_state()
    hidden = model.forward([Slice(state, IDS)], last_layer=1).hidden
    result = model.forward([Slice(state, IDS)], first_layer=2, hidden=hidden, wanted=EVERY)
    assert result.logits is not None
    assert torch.equal(result.logits, whole(model))


def test_taps_see_every_layer_and_change_nothing(model: DeepseekV4) -> None:
    seen: dict[str, list[Any]] = {"stream": [], "router": [], "input": []}
    taps = Taps(
        stream=lambda layer, x: seen["stream"].append((layer, tuple(x.shape))),
        router=lambda layer, chosen, weights: seen["router"].append((layer, chosen.clone(), weights.clone())),
        expert_input=lambda layer, x: seen["input"].append((layer, tuple(x.shape))),
    )
    assert torch.equal(whole(model, taps=taps), whole(model))
    assert seen["stream"] == [(i, (70, 4, 32)) for i in range(5)]
    assert seen["input"] == [(i, (70, 32)) for i in range(5)]
    for layer, chosen, weights in seen["router"]:
        assert chosen.shape == (70, 2)
        assert torch.allclose(weights.sum(1), torch.full((70,), SMALL.route_scale))
        if layer < SMALL.hash_layers:
            table = model.weights.layers[layer].expert_table
            assert table is not None
            assert torch.equal(chosen, table[IDS].long())


def test_edits_change_what_a_sublayer_adds(model: DeepseekV4) -> None:
    same = Edits(attention=lambda layer, y: y, ffn=lambda layer, y: y - 0.0)
    assert torch.equal(whole(model, edits=same), whole(model))
    for edits in (Edits(attention=lambda layer, y: y * 0.9), Edits(ffn=lambda layer, y: y * 0.9)):
        assert not torch.equal(whole(model, edits=edits), whole(model))


def test_the_choice_of_rows_matters_once_there_is_one() -> None:
    weights = ModelWeights.load(TensorSource(SMALL, random_tensors(SMALL, 1)))
    topk, every, random = (DeepseekV4(weights, True, how) for how in ("topk", "all", "random"))
    free = (SMALL.index_top_k + 1) * SMALL.sparse_ratio - 1  # up to here each visible row is taken
    for other in (every, random):
        assert torch.equal(whole(topk)[:free], whole(other)[:free])
        assert not torch.equal(whole(topk)[free:], whole(other)[free:])
    assert torch.equal(whole(random), whole(random))


def test_engine_step_takes_taps_and_edits() -> None:
    engine = random_engine()
    layers: list[int] = []
    engine.step([(engine.session(), [1, 2])], taps=Taps(stream=lambda layer, x: layers.append(layer)))
    assert layers == [0, 1, 2, 3, 4]
