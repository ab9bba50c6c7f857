"""What the harness costs in time: the same training by three programs, each in its own process."""
