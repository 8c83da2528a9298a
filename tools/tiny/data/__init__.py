"""Seeded training and evaluation data for ds4-tiny. See ../DATA.md."""

from .generator import Generator

__all__ = ["Generator"]
