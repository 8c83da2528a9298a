"""The tap of expert energies against sums made token by token from what the other taps show."""

from __future__ import annotations

import torch

from ds4 import ops
from ds4.model import DeepseekV4, ModelWeights, Taps, TensorSource
from ds4.model.deepseek_v4 import Slice
from tests.helpers import SMALL, random_tensors

S = SMALL


def plain_sums(
    tensors: dict[str, torch.Tensor], layer: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> ops.ExpertEnergy:
    """Token by token, in float64, from the tensors of the file."""
    gate, up = (tensors[f"blk.{layer}.ffn_{kind}_exps.weight"].double() for kind in ("gate", "up"))
    sums = ops.ExpertEnergy.zeros(S.experts, S.hidden, S.expert_hidden)
    for row, experts, factors in zip(x.double(), chosen.tolist(), weights.double().tolist(), strict=True):
        for expert, factor in zip(experts, factors, strict=True):
            g = (gate[expert] @ row).clamp(max=S.swiglu_clamp)
            u = (up[expert] @ row).clamp(-S.swiglu_clamp, S.swiglu_clamp)
            sums.gate_up[expert] += row**2
            sums.down[expert] += (factor * g * torch.sigmoid(g) * u) ** 2
            sums.counts[expert] += 1
    return sums


def test_sums_of_every_layer() -> None:
    tensors = random_tensors(S, 3)
    model = DeepseekV4(ModelWeights.load(TensorSource(S, tensors)), qat_sim=True)
    seen: dict[int, ops.ExpertEnergy] = {}
    inputs: dict[int, torch.Tensor] = {}
    routes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    taps = Taps(
        expert_energy=seen.__setitem__,
        expert_input=lambda layer, x: inputs.__setitem__(layer, x.clone()),
        router=lambda layer, chosen, weights: routes.__setitem__(layer, (chosen.clone(), weights.clone())),
    )
    ids = torch.randint(0, S.vocab, (45,), generator=torch.Generator().manual_seed(1))
    state, other = model.new_state(), model.new_state()
    with_taps = model.forward([Slice(state, ids)], wanted=torch.tensor([44]), taps=taps)
    without = model.forward([Slice(other, ids)], wanted=torch.tensor([44]))
    assert with_taps.logits is not None
    assert without.logits is not None
    assert torch.equal(with_taps.logits, without.logits)
    assert sorted(seen) == list(range(S.layers))
    for layer, found in seen.items():
        expected = plain_sums(tensors, layer, inputs[layer], *routes[layer])
        assert torch.equal(found.counts, expected.counts)
        assert int(found.counts.sum()) == 45 * S.experts_used
        torch.testing.assert_close(found.gate_up, expected.gate_up, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.down, expected.down, rtol=1e-4, atol=1e-9)


def test_sums_of_pieces_add_up() -> None:
    """Rows are exact on the CPU, so only the order of the sums differs."""
    model = DeepseekV4(ModelWeights.load(TensorSource(S, random_tensors(S, 3))), qat_sim=True)
    ids = torch.randint(0, S.vocab, (40,), generator=torch.Generator().manual_seed(2))

    def total(*cuts: int) -> list[ops.ExpertEnergy]:
        sums = [ops.ExpertEnergy.zeros(S.experts, S.hidden, S.expert_hidden) for _ in range(S.layers)]
        state, taps = model.new_state(), Taps(expert_energy=lambda layer, part: sums[layer].add(part))
        for begin, end in zip((0, *cuts), (*cuts, 40), strict=True):
            model.forward([Slice(state, ids[begin:end])], taps=taps)
            state.advance(end - begin)
        return sums

    for whole, parts in zip(total(), total(1, 18, 33), strict=True):
        assert torch.equal(whole.counts, parts.counts)
        torch.testing.assert_close(whole.gate_up, parts.gate_up, rtol=1e-12, atol=0)
        torch.testing.assert_close(whole.down, parts.down, rtol=1e-12, atol=0)
