"""Communication between ranks: collectives at the start and the end, messages in between."""
