"""What the preflight looks at: one noun a file, measured on every rank and judged on rank 0."""
