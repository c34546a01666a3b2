"""What is left after a failure: found, agreed on, brought to the ranks that need it."""
