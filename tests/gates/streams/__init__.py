"""A device with streams, simulated on CPU ranks: finds races and host waits, by file and line."""
