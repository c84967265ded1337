"""Scoring a run's policy: loading it, playing whole games, the record of what came of it, reference scores, a video."""
