"""Parts of tools/studio.py: pages as data, their drawing, their view in a browser, their guard."""
