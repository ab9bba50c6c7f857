"""Planner: counts every layout of a job on a cluster and finds the fastest that fit."""
