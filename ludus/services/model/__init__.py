"""Model service: the OpenAI API over a policy."""
