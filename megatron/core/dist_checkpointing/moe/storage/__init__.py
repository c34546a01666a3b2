"""Snapshots at rest: in host memory, in files, in object stores; and the manifests that make bytes a snapshot."""
