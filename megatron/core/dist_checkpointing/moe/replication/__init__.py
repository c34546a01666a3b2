"""Copies in the memory of peers: bytes between ranks, and the protocol by which replicas are given and kept."""
