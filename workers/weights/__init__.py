"""Weights of other libraries, in and out: folders as Hugging Face's transformers reads and writes them."""
