"""Weights of other libraries, in and out: folders in the format of Hugging Face's transformers."""
