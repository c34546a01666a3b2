"""The real coordinator over simulated surroundings: seeded interleavings, a virtual clock, a crash at any event."""
