"""The checks of whole models on a CUDA device that `gpu_check.py` runs, one module a check."""
