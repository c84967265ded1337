"""The program `pala compare`."""

from pala.lab.compare.__main__ import main

if __name__ == "__main__":
    main()
