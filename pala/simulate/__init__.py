"""`python -m pala.simulate`: the protocol on the virtual cluster, with measured costs, past the machines at hand."""
