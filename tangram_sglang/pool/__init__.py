"""Pages, their owners and the ragged page tables; imports neither SGLang nor Triton."""
