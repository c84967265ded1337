"""The program `python -m pala.presets`."""

from pala.config.presets import main

if __name__ == "__main__":
    main()
