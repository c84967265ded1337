"""The common part of programs that report: learning curves, marks in pictures, pictures, and a run's files."""
