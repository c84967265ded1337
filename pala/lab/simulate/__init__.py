"""`pala simulate`: the protocol on the virtual cluster, put to the test and past the machines at hand."""
