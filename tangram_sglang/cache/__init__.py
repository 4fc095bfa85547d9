"""The prefix cache's tree; imports neither SGLang nor Triton."""
