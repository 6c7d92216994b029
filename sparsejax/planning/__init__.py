"""Estimates before training: bytes on the wire, times, and the best exchange."""
