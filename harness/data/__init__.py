"""From text to batches, in this order: harness/files/formats reads rows, files/rows.py and
files/forms.py find the text or turns in them; corpus.py, encoding.py (tokens), prepare.py (on disk
as pair.py), split.py (held-out documents), packing.py (samples), order.py, batches.py. source.py
and build.py drive it.
"""
