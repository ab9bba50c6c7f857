"""Saves, resumes and exports runs."""
