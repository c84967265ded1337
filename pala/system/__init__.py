"""Common tools of every part of PALA: errors for people, files, jobs, the process, random streams."""
