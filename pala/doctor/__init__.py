"""`pala doctor`: what a user must know of this machine before training (docs/doctor.md)."""
