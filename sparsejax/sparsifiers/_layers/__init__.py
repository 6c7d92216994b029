"""A share of the target for each layer: the selection of DEFT."""
