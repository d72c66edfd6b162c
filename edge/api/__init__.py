"""The local server: the API that OpenAI's clients speak, a page, and what it is measured by."""
