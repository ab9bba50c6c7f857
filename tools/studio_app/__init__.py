"""Parts of tools/studio.py: pages and figures as data, their view in a browser, the server."""
