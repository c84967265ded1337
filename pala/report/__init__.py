"""What the programs that report have in common: numbers and tables as text, curves, pictures, settings compared."""
