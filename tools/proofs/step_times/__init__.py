"""Steps of real engines on CPU ranks, timed beside their estimates."""
