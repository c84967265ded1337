"""The program `pala chaos`."""

from pala.lab.chaos.__main__ import main

if __name__ == "__main__":
    main()
