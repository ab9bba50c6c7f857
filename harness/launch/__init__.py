"""Starts ranks on this machine, as new processes or forked from a warm one."""
