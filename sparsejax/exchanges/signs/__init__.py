"""Exchanges of sign bits."""
