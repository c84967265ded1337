"""`pala benchmark`: what training costs on this machine, and what it could cost at best."""
