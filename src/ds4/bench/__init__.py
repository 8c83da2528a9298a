"""`ds4-bench`: speeds over the context, what limits them, memory, and comparisons of two such measurements."""
