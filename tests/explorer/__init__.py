"""The gossip protocol put to the test, for developers: `python tests/explorer check` and `explore`."""
