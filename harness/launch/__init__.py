"""Groups of ranks on this machine, each a process started anew or forked from one that is ready."""
