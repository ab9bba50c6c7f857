"""Measures training speed, case by case."""
