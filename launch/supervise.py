"""`python launch/supervise.py`: the program `pala.supervise`, in a checkout."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a job begins there is nothing to end, nor to tell

from pala.supervise import main

if __name__ == "__main__":
    main()
