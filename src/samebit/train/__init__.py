"""The trainer: packing, optimiser step, checkpoints."""
