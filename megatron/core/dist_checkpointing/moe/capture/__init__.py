"""What is copied and when: operators of a live model, and the tensors of their training state."""
