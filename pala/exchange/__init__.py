"""The exchange between ranks: the one object in which the variants of training differ.

Nothing in here knows of environments, networks or algorithms; nothing outside knows what a peer is.
`pala/config/catalogue.py` says what each kind needs and gives, `make.py` makes one.
"""
