"""The program `pala trace`."""

from pala.report.draw_timeline import main

if __name__ == "__main__":
    main()
