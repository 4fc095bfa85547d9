"""Budgets, grouping and the layout that follows from them; imports neither SGLang nor Triton."""
