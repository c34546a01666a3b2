"""Recovery of single pipeline stages: logs of what stages send each other, and state that survivors keep."""
