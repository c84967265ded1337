"""The program `pala plot`."""

from pala.report.plot import main

if __name__ == "__main__":
    main()
