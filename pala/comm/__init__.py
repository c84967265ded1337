"""How ranks reach each other: collectives at the start and the end, messages in between."""
