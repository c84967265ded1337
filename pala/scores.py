"""The program `pala scores`."""

from pala.lab.scores import main

if __name__ == "__main__":
    main()
