"""Pure layers built on the operator set."""
