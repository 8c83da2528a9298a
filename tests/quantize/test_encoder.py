"""Values that a type cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4.errors import Ds4Error
from ds4.quantize.codes import decode
from ds4.quantize.encoder import encode_rows


@pytest.mark.parametrize(("type", "largest"), [(T.Q8_0, 8.3e6), (T.Q4_K, 4.1e6), (T.Q2_K, 9.8e5), (T.IQ2_XXS, 2.02e6)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_values_beyond_the_scales_of_a_type_are_named(type: T, largest: float, sign: float) -> None:
    """Up to there they are held, beyond they would be clipped without a word."""
    held = np.asarray(decode(encode_rows(torch.full((1, 256), sign * largest), type, None, "x"), type))
    assert np.abs(held - sign * largest).max() < 0.02 * largest
    for value in (1.01 * largest, 3e38):
        spoiled = torch.zeros(1, 256)
        spoiled[0, 7] = sign * value
        with pytest.raises(Ds4Error, match=f"tensor 'x' has values beyond .* the range of {type.name}"):
            encode_rows(spoiled, type, None, "x")
