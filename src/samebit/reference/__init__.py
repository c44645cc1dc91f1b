"""The definition of every operator in torch, on any device; exact or row-invariant by construction."""
