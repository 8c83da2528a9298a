"""The parts of tools/client_check.py: set-ups of clients, the loops they run, and a network of one machine."""
