"""The program `pala evaluate`."""

from pala.evaluation.evaluate import main

if __name__ == "__main__":
    main()
