"""Answers over HTTP: requests and responses as OpenAI's API has them, and the batch that all requests share."""
