"""From text to batches. In order: harness/files/formats/ reads rows; files/table.py and
files/forms.py find the text or turns in them; corpus.py yields documents and encoding.py their
tokens, which prepare.py stores (pair.py is their format); split.py holds out documents; packing.py
makes samples, order.py shuffles them, and batches.py returns them as tensors. source.py and
build.py drive all of this.
"""
