"""The program `pala play`."""

from pala.evaluation.play import main

if __name__ == "__main__":
    main()
