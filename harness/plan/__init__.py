"""Turns both configs and the world into a Plan."""
