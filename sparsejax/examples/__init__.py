"""Trainers that run as they are: `python -m sparsejax.examples.digits`.

They need the extra `examples`: `pip install 'sparsejax[examples]'`.
"""
