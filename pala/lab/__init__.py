"""Instruments: simulation, benchmark, comparison. They may import everything; nothing imports them but programs."""
