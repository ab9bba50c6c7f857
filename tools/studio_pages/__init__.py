"""The pages of tools/studio.py, each with its settings, its computation and its drawing."""

from importlib import import_module

from tools.studio_app.page import LESSONS, Page

PAGES: tuple[Page, ...] = tuple(
    import_module(f"tools.studio_pages.{slug}").PAGE for slug in LESSONS
)
"""All pages in the order of lessons.toml."""
