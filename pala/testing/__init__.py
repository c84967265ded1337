"""Ranks as threads of one process, and scripted faults: for tests, and for the simulator."""
