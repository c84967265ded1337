"""What every part of PALA stands on: errors for people, files, jobs, the process, random streams."""
