"""What a run will hold in memory: bytes per rank, phase and component, each with its evidence."""
