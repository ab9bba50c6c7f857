"""Defects for the gate to catch."""
