"""Values of `data.format`: every file here is one format, FORMAT, and all there is to it."""
