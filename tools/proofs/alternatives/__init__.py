"""The same twenty steps by other programs, written as their users write them."""
