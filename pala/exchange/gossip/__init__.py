"""Gossip in layers: topology, process lock, protocol, mixing, codecs, driver."""
