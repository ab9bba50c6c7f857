"""Guards a run against spikes, divergence, hangs and differing replicas; handles stop signals."""
