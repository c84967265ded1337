"""What the programs that report have in common: learning curves, marks in pictures, pictures, and a run's files."""
