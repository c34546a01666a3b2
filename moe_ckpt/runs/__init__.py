"""What jobs have written of themselves: read, added up, and shown as a page, as they end and while they run."""
