"""The HTTP face: the OpenAI API over an engine that lives in another process."""
