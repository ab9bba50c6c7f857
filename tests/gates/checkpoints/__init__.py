"""The round trip of checkpoints: nothing may be lost between layouts."""
