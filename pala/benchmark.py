"""The program `pala benchmark`."""

from pala.lab.benchmark.__main__ import main

if __name__ == "__main__":
    main()
