"""Loops over blocks, compiled by numba for one CPU core; import only where numba is installed.

Every function works in the order that it is written in, without fast-math: the bytes depend on the values alone, not
on the vector width of the machine. Loops over eight or 256 neighbours are what the compiler turns into vectors.
"""
