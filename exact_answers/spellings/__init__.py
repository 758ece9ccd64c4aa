"""How models spell answers: what stands around them, words, code, statements and named parts."""
