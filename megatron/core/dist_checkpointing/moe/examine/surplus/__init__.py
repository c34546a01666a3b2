"""What of a place may be freed, and why the rest stays: storage, --save folders, the memory of nodes."""
