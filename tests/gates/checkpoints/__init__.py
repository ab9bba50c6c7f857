"""The round trip of checkpoints: does anything get lost between one layout and another?"""
