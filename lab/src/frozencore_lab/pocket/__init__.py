"""Make the shipped pocket model: generated text, tokenizer, training and card."""
