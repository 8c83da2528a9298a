"""Kernels run in Triton's interpreter where there is no GPU. It has to be chosen before triton is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run: the GPU, or the CPU through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
