"""Weights to and from folders as Hugging Face's transformers write them, tensor by tensor, without a job."""
