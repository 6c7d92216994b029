"""Trainers to run without changes: `python -m sparsejax.examples.digits`.

They need the extra `examples`: `pip install 'sparsejax[examples]'`.
"""
