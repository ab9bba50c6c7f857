"""Planner: counts the layouts of a job on a cluster and recommends one that fits."""
