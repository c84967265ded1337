"""The console where its output is no terminal. Loads no rich."""

from __future__ import annotations

from pala.system.output import print_result


class Lines:
    """One line each time, without control characters."""

    def show(self, figures: dict[str, str]) -> None:
        """Show the figures: label -> text, in this order."""
        print_result(" | ".join(f"{label} {text}" for label, text in figures.items()))

    def estimate(self, text: str) -> None:
        """Show once how long the run takes."""
        print_result(text)

    def close(self) -> None:
        """Close the output; there is nothing to restore."""
