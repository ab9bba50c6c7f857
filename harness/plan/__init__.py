"""Both configs and the world, made one Plan."""
