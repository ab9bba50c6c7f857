"""A device with streams, simulated on CPU ranks: races, and waits of the host, by file and line."""
