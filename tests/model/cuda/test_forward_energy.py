"""The tap of expert energies on the device: what the kernels sum, against the torch graph over the same weights."""

from __future__ import annotations

import pytest
import torch

from ds4 import ops
from ds4.engine.engine import ModelRunner
from ds4.errors import Ds4Error
from ds4.model import DeepseekV4, ModelWeights, Taps, TensorSource
from ds4.model.cuda.runner import CudaRunner
from ds4.model.cuda.weights import DeviceWeights, TensorBytes
from ds4.model.deepseek_v4 import Edits
from tests.helpers import random_tensors
from tests.model.cuda.test_forward import CONFIG, IDS, ON_GPU, SHAPE

S = SHAPE


class Sums:
    """What a tap gave, added up per layer, on the host."""

    def __init__(self) -> None:
        self.layers = [ops.ExpertEnergy.zeros(S.experts, S.hidden, S.expert_hidden) for _ in range(S.layers)]
        self.taps = Taps(expert_energy=self.add)

    def add(self, layer: int, energy: ops.ExpertEnergy) -> None:
        self.layers[layer].add(
            ops.ExpertEnergy(energy.gate_up.cpu(), energy.down.cpu(), energy.counts.to("cpu", torch.int64))
        )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("pieces", [[1, 7, 14]], ids=str)
def test_sums_against_the_torch_graph(pieces: list[int], device: str) -> None:
    """Short pieces, which would go through the kernels of decode, count too; the state goes on from piece to piece."""
    source = TensorBytes(SHAPE, random_tensors(SHAPE, 7))
    there = CudaRunner(DeviceWeights.load(source, device), CONFIG)
    here = ModelRunner(DeepseekV4(ModelWeights.load(TensorSource(SHAPE, source.decoded())), qat_sim=True))
    sums = []
    for runner in (here, there):
        found, state, start = Sums(), runner.new_state(), 0
        for count in pieces:
            runner.evaluate([(state, IDS[start : start + count])], ["none"], found.taps, None)
            start += count
        assert state.length == sum(pieces)
        sums.append(found.layers)
    for layer, (expected, found) in enumerate(zip(*sums, strict=True)):
        assert int(found.counts.sum()) == sum(pieces) * S.experts_used
        # Where two experts nearly tie the device may take the other one, and passes that on to the layers behind.
        moved = int((expected.counts - found.counts).abs().sum())
        assert moved <= (6 if ON_GPU else 0)
        bar = 0.15 if moved else (3e-2 if ON_GPU else 1e-2)
        assert relative(found.gate_up, expected.gate_up) < bar, layer
        assert relative(found.down, expected.down) < bar, layer


def test_a_tap_changes_no_logits(device: str) -> None:
    weights = DeviceWeights.load(TensorBytes(SHAPE, random_tensors(SHAPE, 7)), device)
    logits = []
    for taps in (None, Sums().taps):
        runner = CudaRunner(weights, CONFIG)
        logits.append(runner.evaluate([(runner.new_state(), IDS[:9])], ["last"], taps, None)[0])
    assert logits[0] is not None
    assert torch.equal(*logits)


def test_other_taps_are_refused(device: str) -> None:
    runner = CudaRunner(DeviceWeights.load(TensorBytes(SHAPE, random_tensors(SHAPE, 7)), device), CONFIG)
    state, both = runner.new_state(), Taps(expert_energy=print, router=print)
    for taps, edits in ((both, None), (Taps(stream=print), None), (None, Edits())):
        with pytest.raises(Ds4Error, match="taps and edits work on the CPU only"):
            runner.evaluate([(state, [1])], ["last"], taps, edits)
