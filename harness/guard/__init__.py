"""The guard of a run: stop signals, spikes, divergence, hangs, replicas that differ."""
