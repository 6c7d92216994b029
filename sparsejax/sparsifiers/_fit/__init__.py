"""Thresholds from fitted distributions: the selection of SIDCo."""
