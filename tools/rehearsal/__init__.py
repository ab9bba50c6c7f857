"""A job, rehearsed small: what is made of it, its stages, what is said of them."""
