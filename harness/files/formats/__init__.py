"""Values of data.format: each file here defines one format as FORMAT."""
