"""`python launch/supervise.py`: the program `pala.supervise`, in a checkout."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a job begins there is nothing to end, nor to tell
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # for one rank, which then leaves

from pala.supervise import main

if __name__ == "__main__":
    main()
