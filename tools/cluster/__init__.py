"""Layouts of a job on a cluster: all of them counted, the quickest that fit."""
