"""Triton kernels for CUDA devices, one file per operation, each with one public launcher.

A launcher writes into tensors that it is given and neither allocates nor waits for the device, so that a step can be
captured in a CUDA graph. `triton` is imported by the files that hold kernels, never by this package or by `planes`:
import what you need when a device is there.
"""
