"""The parity gate: does the layout change what is learned?"""
