"""Harness of the tests: all that test modules import from each other."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
