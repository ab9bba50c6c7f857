"""All pages of the studio, in the order of lessons.toml; importing them takes seconds."""

from importlib import import_module

from tools.studio_app.page import LESSONS, Page

PAGES: tuple[Page, ...] = tuple(
    import_module(f"tools.studio_pages.{slug}").PAGE for slug in LESSONS
)
