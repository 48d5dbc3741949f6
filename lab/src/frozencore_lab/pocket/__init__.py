"""How the shipped pocket model is made: generated text, tokenizer, training and card."""
