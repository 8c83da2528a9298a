"""How good a model is: perplexity of text, and scores of given continuations."""
