"""What the gossip protocol does on clusters that are not at hand: `python -m pala.simulate`."""
