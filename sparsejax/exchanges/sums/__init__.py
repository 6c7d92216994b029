"""Exact sums of sparse vectors."""
