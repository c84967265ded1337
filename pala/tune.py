"""The program `pala tune`."""

from pala.lab.simulate.tune import main

if __name__ == "__main__":
    main()
