"""Gossip in layers: topology, process lock, protocol and mixing decide, in messages and actions;
codecs and models hold what goes over the wire; the driver runs all, for a rank (`exchange`), a spare (`sleeping`).

To read it: messages, state, protocol, paired (the default), driver, models, codecs, exchange."""
