"""Stories from a grammar: words, facts, scenes and plots."""
