"""What every part of PALA uses: errors for people, files, jobs, the process, random streams."""
