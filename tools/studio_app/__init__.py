"""Parts of tools/studio.py: pages and figures as data, the browser view, the server."""
