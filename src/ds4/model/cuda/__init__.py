"""The graph on a CUDA device. `plan` needs none; the rest is imported only where there is one."""
