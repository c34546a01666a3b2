"""A snapshot's life on one rank: copied, sealed, replicated, persisted, freed."""
