"""The program `pala simulate`."""

from pala.lab.simulate.__main__ import main

if __name__ == "__main__":
    main()
