"""What keeps a run alive: signals and stop decisions, spikes, replicas."""
